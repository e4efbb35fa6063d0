"""Return values of environments that end every row after its first turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.interfaces.environment import EnvironmentReturn


def ended(
    rewards: Sequence[float] | torch.Tensor | Mapping[str, Sequence[float]],
    metadata: Sequence[Any],
    *,
    replies: Sequence[str] | None = None,
    answers: Sequence[str | None] | None = None,
    scored: Sequence[bool] | None = None,
    failures: Sequence[str | None] | None = None,
) -> EnvironmentReturn:
    """The return value of `step` if all B rows end.

    Args:
        rewards: B numbers, or B numbers by name.
        metadata: B objects.
        replies: B texts for logs and for `rlcore env play`; empty if None. No model reads them, because every row ends.
        answers: B parsed answers, if there are any.
        scored: B entries, False for rows that could not be scored; by default those without a failure.
        failures: B entries: why a row could not be scored, if the model did not cause it, else None.
    """
    rows = len(metadata)
    if scored is None and failures is not None:
        scored = [failure is None for failure in failures]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": text} for text in replies or [""] * rows],
        metadata=list(metadata),
        next_stop_strings=[None] * rows,
        rewards={name: _float32(each) for name, each in rewards.items()} if isinstance(rewards, Mapping) else _float32(rewards),
        terminateds=torch.ones(rows),
        answers=None if answers is None else list(answers),
        scored=None if scored is None else torch.tensor(list(scored), dtype=torch.bool),
        failures=None if failures is None else list(failures),
    )


def correctness_replies(is_correct: Sequence[bool]) -> list[str]:
    """The environment's reply to each row: `correct` or `incorrect`."""
    return ["correct" if each else "incorrect" for each in is_correct]


def _float32(numbers: Sequence[float] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.float32)
