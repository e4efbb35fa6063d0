"""Shows one prompt of a step with its best and its worst sample (`rlcore train --show-samples STEPS`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 1500
"""Longer texts are shown without their middle."""


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
