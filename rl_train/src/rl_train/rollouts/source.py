"""The interface of sources of an algorithm's rollouts, and rollouts that begin."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.data.messages import DatumSpec
from rl_train.rollouts.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """One step's rollouts."""

    batch: BatchedDataDict[Any]
    """Rows, see `rl_train.rollouts.trajectory.to_batch`."""
    metrics: dict[str, float]
    """Statistics of the rollouts."""
    trajectories: list[Trajectory]
    """The same rollouts as conversations."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which groups a step trains on. Each group is judged once, as a whole, when all of its rows have ended."""

    keep: Callable[[list[Trajectory]], bool]
    """Whether a finished group may be trained on; otherwise, a group of the next prompt replaces it."""
    max_groups: int
    """A step that has judged this many groups continues with those that were kept."""
    oversampling: float
    """Number of groups that begin for each missing one; at least 1."""
    advice: str
    """Ends the error of a step without any group."""


class RolloutSource(ABC):
    """Gives an algorithm its next groups of rollouts."""

    @abstractmethod
    def take(self, step: int, groups: int, selection: Selection | None = None) -> Rollouts:
        """The next complete groups: all G rows of a prompt are included and share a `group_ids` entry.

        Every call returns other groups.

        Args:
            step: the step that trains on them; the engine has the weights that the step starts with.
            groups: number of groups.
            selection: which groups to keep; all of them by default. With it, there may be fewer groups.
        """

    def skip(self, step: int) -> None:
        """A step takes no groups; the engine has the weights that it starts with."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position of the source, so that a resumed run takes the same prompts as an uninterrupted one."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""

    def end_rollouts(self) -> None:
        """Wait until no rollout is in progress."""
        return None

    def save_files(self, folder: Path) -> None:
        """Write what is too large for `state_dict`."""
        return None

    def load_files(self, folder: Path) -> None:
        """Continue from `save_files`, after `load_state_dict`. The folder may not exist."""
        return None

    def close(self) -> None:
        """Stop background work; may be called repeatedly."""
        return None


def start_rollouts(prompts: Sequence[DatumSpec], group_size: int, *, ordinals: Sequence[int] | None = None) -> list[Trajectory]:
    """G rollouts of each prompt, where the G rows of a prompt are consecutive; the group is the position of the prompt.

    Args:
        prompts: P prompts.
        group_size: G.
        ordinals: P ordinals, see `rl_train.rollouts.seeds.rollout_seed`; 0 to P - 1 by default.
    """
    numbers = range(len(prompts)) if ordinals is None else ordinals
    return [
        Trajectory(
            message_log=[{**message} for message in prompt["message_log"]],
            metadata=copy.deepcopy(prompt["extra_env_info"]),  # an environment may change it in place
            task_name=prompt.get("task_name", "default"),
            group_id=group,
            index=int(prompt["idx"]),
            ordinal=ordinal,
            sample=sample,
            loss_multiplier=float(prompt["loss_multiplier"]),
            stop_strings=prompt.get("stop_strings"),
            tools=prompt.get("tools"),
            prefill=prompt.get("prefill", ""),
        )
        for group, (prompt, ordinal) in enumerate(zip(prompts, numbers, strict=True))
        for sample in range(group_size)
    ]
