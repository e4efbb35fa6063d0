"""Console output of a run: a live display on a terminal, one line per step when redirected, and samples of a prompt."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rl_train.metrics.logger import Logger
from rl_train.metrics.progress import PRINT_EVERY_S, ProgressPrinter

_log = logging.getLogger("rlcore")

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("preference/margin", "margin", ".3f"),
    ("kto/margin", "margin", ".3f"),
    ("validation/accuracy", "accuracy", ".3f"),
    ("validation/loss", "val loss", ".4f"),
    ("length/mean", "length", ".1f"),
    ("grad_norm", "grad", ".3f"),
    ("mismatch/kl", "mismatch", ".1e"),
    ("tokens_per_s", "tok/s", ".0f"),
    ("time/step_s", "s", ".2f"),
)
"""Metric, short name and format, in display order."""
_SMALL_MISMATCH = 1e-3
"""In nats; sampling and training then agree, as in bfloat16."""
VALIDATION_REWARD = ("validation/reward", "val reward", ".3f")
"""Shown if the validation has no accuracy."""
MAX_CHARACTERS = 1500
"""Longer texts are shown without their middle."""


class _Screen(Console):
    """A console that keeps the run alive if its reader exits, as in `rlcore train ... | head`; later output is dropped."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python flushes standard output when it exits, so it must stay open.
        closed = os.open(os.devnull, os.O_WRONLY)
        os.dup2(closed, sys.stdout.fileno())
        os.close(closed)
        _log.warning("standard output was closed; the run continues without console output")


class _Display(Progress):
    """The progress bar with the latest metrics below it, in as many columns as fit."""

    numbers: Sequence[str] = ()
    describe: Callable[[], str] = staticmethod(lambda: "")

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Columns(self.numbers, padding=(0, 2))
        if line := self.describe():
            yield Text(line, no_wrap=True, overflow="ellipsis")


class ConsoleLogger(Logger):
    """Prints the most important metrics of a run.

    Args:
        total_steps: Number of steps of the run.
        first_step: Number of steps completed before a resume.
        earlier_s: Seconds that earlier processes of the run trained, which the elapsed time includes.
        clip_norm: `policy.max_grad_norm`. A larger gradient norm is shown, and so is a gradient of zero.
        describe: Returns what the run is doing, in one line; '' for nothing.
        progress_every_s: Seconds without a new line after which redirected output shows what the run is doing.
        console: The console; standard output by default.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        earlier_s: float = 0.0,
        clip_norm: float | None = None,
        describe: Callable[[], str] = lambda: "",
        progress_every_s: float = PRINT_EVERY_S,
        console: Console | None = None,
    ) -> None:
        self._clip_norm, self._next = clip_norm, first_step + 1
        self._console = console or _Screen(file=sys.stdout, highlight=False)
        self._total = total_steps
        self._display: _Display | None = None
        if self._console.is_terminal:
            self._display = _Display(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._display.describe = describe
            self._task = self._display.add_task("train", total=total_steps, completed=first_step)
            started = self._display.tasks[0].start_time
            assert started is not None
            self._display.tasks[0].start_time = started - earlier_s
            self._display.start()
        self._printer = ProgressPrinter(
            lambda: f"step {self._next}/{self._total}  {line}" if (line := describe()) else "",
            self.show,
            every_s=progress_every_s,
        )
        if self._display is None:
            self._printer.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows one step; validation metrics stay on a line above the live display."""
        shown = SHOWN if "validation/accuracy" in metrics else (VALIDATION_REWARD, *SHOWN)
        said = {name for name in metrics if self._is_informative(name, metrics)}
        numbers = {name: f"{short} {metrics[name]:{form}}" for name, short, form in shown if name in said}
        self._next = min(step + 1, self._total)  # after the last step, its checkpoint and the end follow
        self._printer.printed()
        if self._display is None:
            self._console.print("  ".join([f"step {step}/{self._total}", *numbers.values()]), soft_wrap=True)
            return
        validated = [number for name, number in numbers.items() if name.startswith("validation/")]
        if validated:
            self._display.console.print(f"step {step}/{self._total}  {'  '.join(validated)}")
        self._display.numbers = tuple(numbers.values())
        self._display.update(self._task, completed=step, refresh=True)

    def _is_informative(self, name: str, metrics: Mapping[str, float]) -> bool:
        """Whether a metric is worth its place: the policy-gradient loss, for example, is near 0 whatever happens."""
        if name == "loss":
            return "reward/mean" not in metrics
        if name == "mismatch/kl":
            return not metrics[name] < _SMALL_MISMATCH
        if name == "grad_norm":
            return not 0.0 < metrics[name] <= (self._clip_norm or math.inf)
        return True

    def show(self, text: str) -> None:
        """Prints a text as it is, above the live display."""
        self._console.print(text, soft_wrap=True, markup=False)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Does nothing: the config is in the run folder."""

    def finish(self) -> None:
        self._printer.close()
        if self._display is not None:
            self._display.stop()
            self._display = None


class SamplePrinter:
    """Prints samples every few steps.

    Args:
        every: number of steps from one print to the next; the first step is shown too.
        show: prints a text.
    """

    def __init__(self, every: int, show: Callable[[str], None]) -> None:
        self._every, self._show = every, show

    def __call__(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Print the samples of a step, if it is its turn.

        Args:
            rows: records of `rl_train.rollouts.records`.
            step: the step; validation before training is step 0 and is not shown.
        """
        if rows and step > 0 and (step == 1 or step % self._every == 0):
            self._show(samples_text(rows, step))


def samples_text(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """The first prompt whose samples differ in reward (else the first prompt), with its best and its worst sample.

    Args:
        rows: records of one step, at least one.
        step: the step.
    """
    groups: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    scored = {group: [row for row in members if row["scored"]] for group, members in groups.items()}
    chosen = next((group for group, members in scored.items() if len({row["reward"] for row in members}) > 1), None)
    shown = scored[chosen] if chosen is not None else next((members for members in scored.values() if members), [])
    if not shown:
        return f"step {step}: no sample was scored"
    ordered = sorted(shown, key=lambda row: row["reward"])
    best, worst = ordered[-1], ordered[0]
    mean = sum(row["reward"] for row in shown) / len(shown)
    expected = best.get("expected_answer")
    samples = f"1 sample, {_reward(best)}" if len(shown) == 1 else f"{len(shown)} samples, mean reward {mean:.3f}"
    parts = [
        f"--- step {step}: a prompt of task {best['task']}, {samples}",
        _readable(_prompt(best)),
        *([f"--- expected answer: {_readable(str(expected))}"] if expected is not None else []),
        "--- completion" if len(shown) == 1 else f"--- best: {_reward(best)}",
        _readable(_turns(best)),
    ]
    if worst["reward"] < best["reward"]:
        parts += [f"--- worst: {_reward(worst)}", _readable(_turns(worst))]
    elif len(shown) > 1:
        parts.append("--- all samples have this reward")
    return "\n".join([*parts, "---"])


def _reward(row: Mapping[str, Any]) -> str:
    named = row["reward_parts"]
    details = ", ".join(f"{name} {value:.3f}" for name, value in named.items()) if list(named) != ["reward"] else ""
    cut = ", truncated" if row["truncated"] else ""
    return f"reward {row['reward']:.3f}{f' ({details})' if details else ''}{cut}"


def _prompt(row: Mapping[str, Any]) -> str:
    """The prompt; if it has several messages, each with its role."""
    messages = row["messages"][: _first_sampled(row)]
    # The conversation of a rollout with several segments is that of the last one.
    if row["segments"] or len(messages) < 2:
        return str(row["prompt"])
    return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)


def _first_sampled(row: Mapping[str, Any]) -> int:
    """Index of the first sampled message of a rollout with one segment."""
    answers = [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    turns = len(row["turn_texts"] or [row["completion"]])
    return answers[-turns] if len(answers) >= turns else len(row["messages"])


def _turns(row: Mapping[str, Any]) -> str:
    """The sampled text; if there are several turns, each on its own line, with the messages between them."""
    texts = row["turn_texts"]
    if texts is None:
        return str(row["completion"])
    lines = [f"[turn {turn}] {text}" for turn, text in enumerate(texts, 1)]
    if row["segments"]:
        return "\n".join(lines)
    sampled = iter(lines)
    return "\n".join(
        next(sampled) if message["role"] == "assistant" else f"[{message['role']}] {message['content']}"
        for message in row["messages"][_first_sampled(row) :]
    )


def _readable(text: str) -> str:
    """A text whose control characters are escaped, since a model may write some that change the terminal."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
