"""Console output of a run: a live display on a terminal, one line per step when redirected."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_train.metrics.logger import Logger

_log = logging.getLogger("rlcore")

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("validation/accuracy", "accuracy", ".3f"),
    ("validation/loss", "val loss", ".4f"),
    ("length/mean", "length", ".1f"),
    ("grad_norm", "grad", ".3f"),
    ("mismatch/kl", "mismatch", ".1e"),
    ("tokens_per_s", "tok/s", ".0f"),
    ("time/step_s", "s", ".2f"),
)
"""Metric, short name and format, in display order."""
VALIDATION_REWARD = ("validation/reward", "val reward", ".3f")
"""Shown if the validation has no accuracy."""


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

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Columns(self.numbers, padding=(0, 2))


class ConsoleLogger(Logger):
    """Prints the most important metrics of a run.

    Args:
        total_steps: Number of steps of the run.
        first_step: Number of steps completed before a resume.
        console: The console; standard output by default.
    """

    def __init__(self, *, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
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
            self._task = self._display.add_task("train", total=total_steps, completed=first_step)
            self._display.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Shows one step; validation metrics stay on a line above the live display."""
        shown = SHOWN if "validation/accuracy" in metrics else (VALIDATION_REWARD, *SHOWN)
        numbers = {name: f"{short} {metrics[name]:{form}}" for name, short, form in shown if name in metrics}
        if self._display is None:
            self._console.print("  ".join([f"step {step}/{self._total}", *numbers.values()]), soft_wrap=True)
            return
        validated = [number for name, number in numbers.items() if name.startswith("validation/")]
        if validated:
            self._display.console.print(f"step {step}/{self._total}  {'  '.join(validated)}")
        self._display.numbers = tuple(numbers.values())
        self._display.update(self._task, completed=step, refresh=True)

    def show(self, text: str) -> None:
        """Prints a text as it is, above the live display."""
        self._console.print(text, soft_wrap=True, markup=False)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Does nothing: the config is in the run folder."""

    def finish(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None
