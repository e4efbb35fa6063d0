"""Return values of environments that end every row after its first turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.interfaces.environment import EnvironmentReturn


def ended(
    rewards: Sequence[float] | Mapping[str, Sequence[float]],
    metadata: Sequence[Any],
    *,
    answers: Sequence[str | None] | None = None,
    scored: Sequence[bool] | None = None,
) -> EnvironmentReturn:
    """The return value for B rows that end.

    Args:
        rewards: B numbers, or B numbers by name.
        metadata: B objects.
        answers: B parsed answers, if there are any.
        scored: B entries, False for rows that could not be scored; None if all were.
    """
    if isinstance(rewards, Mapping):
        numbers: Any = {name: torch.tensor(list(values), dtype=torch.float32) for name, values in rewards.items()}
    else:
        numbers = torch.tensor(list(rewards), dtype=torch.float32)
    rows = len(metadata)
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": ""} for _ in range(rows)],
        metadata=list(metadata),
        next_stop_strings=[None] * rows,
        rewards=numbers,
        terminateds=torch.ones(rows),
        answers=None if answers is None else list(answers),
        scored=None if scored is None else torch.tensor(list(scored), dtype=torch.bool),
    )
