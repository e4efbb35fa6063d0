"""An environment's response to a batch as one result per row, and results as a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.interfaces.environment import EnvironmentReturn
from rl_core.interfaces.messages import Observation


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's response to one turn of one rollout."""

    observation: Observation
    """What the model reads next; ignored if `terminated`."""
    metadata: Any
    """State passed to the next step; None keeps the previous one."""
    rewards: Mapping[str, float]
    """Rewards of this turn by name; `reward` if the environment returns only one."""
    terminated: bool
    stop_strings: list[str] | None = None
    """Stop strings of the next turn."""
    answer: str | None = None
    """The final answer parsed from the row, as text; None if there is none."""
    scored: bool = True
    """Whether the environment could score this turn."""
    failure: str | None = None
    """Why the row could not be answered for a reason that is not the model's; such a row is not scored."""


def named_rewards(rewards: Any) -> Mapping[str, Any]:
    """Rewards by name, of a row or of a batch: rewards without names are `reward`."""
    return rewards if isinstance(rewards, Mapping) else {"reward": rewards}


def step_results(step_return: EnvironmentReturn) -> list[StepResult]:
    """The result of each row."""
    rewards = {name: torch.as_tensor(values).tolist() for name, values in named_rewards(step_return.rewards).items()}
    rows = len(step_return.observations)
    answers, failures = step_return.answers or [None] * rows, step_return.failures or [None] * rows
    return [
        StepResult(
            observation=step_return.observations[row],
            metadata=step_return.metadata[row],
            rewards={name: float(values[row]) for name, values in rewards.items()},
            terminated=bool(ended),
            stop_strings=step_return.next_stop_strings[row],
            answer=answers[row],
            scored=(step_return.scored is None or bool(step_return.scored[row])) and failures[row] is None,
            failure=failures[row],
        )
        for row, ended in enumerate(torch.as_tensor(step_return.terminateds).tolist())
    ]


def environment_return(results: Sequence[StepResult]) -> EnvironmentReturn:
    """The return value of `EnvironmentInterface.step`; a row without a reward that others have gets 0.0 for it."""
    names = dict.fromkeys(name for result in results for name in result.rewards) if results else ["reward"]
    rewards: dict[str, Any] = {name: [result.rewards.get(name, 0.0) for result in results] for name in names}
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # the check of the response names the wrong value
        rewards = {name: torch.tensor(values, dtype=torch.float32) for name, values in rewards.items()}
    return EnvironmentReturn(
        observations=[result.observation for result in results],
        metadata=[result.metadata for result in results],
        next_stop_strings=[result.stop_strings for result in results],
        rewards=rewards["reward"] if list(rewards) == ["reward"] else rewards,
        terminateds=torch.tensor([result.terminated for result in results], dtype=torch.float32),
        answers=[result.answer for result in results],
        scored=torch.tensor([result.scored and result.failure is None for result in results], dtype=torch.bool),
        failures=[result.failure for result in results],
    )
