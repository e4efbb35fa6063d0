"""Sources of an algorithm's rollouts: the interface, and a source that samples on demand."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.messages import DatumSpec
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.equal_rewards import EqualRewardWatch
from rl_train.rollouts.failures import FailureLimit, refuse_total_failure
from rl_train.rollouts.reward_weights import RewardWeightCheck
from rl_train.rollouts.seeds import SampleStream
from rl_train.rollouts.summary import environment_metrics, environment_times, failure_metrics, summarize
from rl_train.rollouts.trajectory import Trajectory, to_batch


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """One step's rollouts."""

    batch: BatchedDataDict[Any]
    """Rows, see `rl_train.rollouts.trajectory.to_batch`."""
    metrics: dict[str, float]
    """Statistics of the rollouts."""
    trajectories: list[Trajectory]
    """The same rollouts as conversations."""


_MAX_REPLACED = 10
"""A step fails once it has replaced this many times its rows."""


class RolloutSource(ABC):
    """Gives an algorithm its next groups of rollouts."""

    @abstractmethod
    def take(self, step: int, groups: int) -> Rollouts:
        """The next complete groups: all G rows of a prompt are included and share a `group_ids` entry.

        A step may take several times. Every call returns other groups.

        Args:
            step: the step that trains on them.
            groups: number of groups.
        """

    @abstractmethod
    def put_back(self, rollouts: Rollouts) -> None:
        """Return groups of the current step that are not trained on; later calls of `take` provide their prompts first.

        Args:
            rollouts: complete groups from `take`.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position of the source, so that a resumed run takes the same prompts as an uninterrupted one."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""

    def close(self) -> None:
        """Stop background work; may be called repeatedly."""
        return None


class OnDemandSource(RolloutSource):
    """Samples rollouts when they are taken, with the current weights of the generation backend.

    Groups that are put back would be off-policy in a later step, so only their prompts are kept, by ordinal. They are sampled
    again, with the weights of the step that takes them. The ordinals are part of the state: no prompt is lost or used twice.

    Args:
        collector: plays the rollouts.
        prompts: the training prompts.
        group_size: G, samples per prompt.
        reward_names: rewards that may be missing in the first step, by task, see `EnvironmentConfig.reward_names`.
        min_scored: number of scored rows that a group needs; a group with fewer is replaced by one of the next prompt.
        max_failed_share: see `rl_train.rollouts.failures.FailureLimit`.
    """

    def __init__(
        self,
        collector: Collector,
        prompts: BatchedDataLoader,
        *,
        group_size: int,
        reward_names: Mapping[str, Collection[str]] | None = None,
        min_scored: int = 1,
        max_failed_share: float = 0.1,
    ) -> None:
        self._collector = collector
        self._prompts = prompts
        self._put_back: list[int] = []
        self._group_size, self._min_scored = group_size, min_scored
        self._failures = FailureLimit(max_failed_share)
        self._watch = EqualRewardWatch()
        self._weights = RewardWeightCheck(reward_names or {})

    def take(self, step: int, groups: int) -> Rollouts:
        """Complete groups of a step; every row has the current weight version of the generation backend.

        Raises:
            RLCoreError: too many rows could not be scored.
        """
        self._failures.expect(step, groups * self._group_size)
        sampled = self._sample(step, groups)
        everything = [row for group in sampled for row in group]
        if groups > 1:
            refuse_total_failure(everything)
        while lacking := [i for i, group in enumerate(sampled) if sum(row.scored for row in group) < self._min_scored]:
            if len(everything) > _MAX_REPLACED * groups * self._group_size:
                raise RLCoreError(
                    f"Step {step}: of {len(everything)} rollouts, too few could be scored for {groups} groups with at least "
                    f"{self._min_scored} scored rows (rollout.min_scored). Check which rows the environment or the reward "
                    "functions leave unscored."
                )
            for i, group in zip(lacking, self._sample(step, len(lacking)), strict=True):
                sampled[i] = group
                everything += group
        trajectories = [row for group in sampled for row in group]
        for i, row in enumerate(trajectories):
            row.group_id = i // self._group_size
        self._weights.check(trajectories)
        self._watch.observe(step, trajectories)
        metrics = summarize(trajectories) | environment_times(everything)
        metrics |= environment_metrics(trajectories, self._collector.environments)
        metrics |= failure_metrics(everything, replaced_groups=len(everything) // self._group_size - groups)
        return Rollouts(batch=to_batch(trajectories), metrics=metrics, trajectories=trajectories)

    def _sample(self, step: int, groups: int) -> list[list[Trajectory]]:
        """Sample the next prompts; G rows each."""
        ordinals, self._put_back = self._put_back[:groups], self._put_back[groups:]
        ordinals += self._prompts.draw(groups - len(ordinals))
        rows = start_rollouts(self._prompts.rows_of(ordinals), self._group_size, ordinals=ordinals)
        self._collector.collect(rows, stream=SampleStream.TRAINING)
        self._failures.count(step, rows)
        return [rows[start : start + self._group_size] for start in range(0, len(rows), self._group_size)]

    def put_back(self, rollouts: Rollouts) -> None:
        """Return groups of the current step that are not trained on; `take` provides their prompts first."""
        ordinals = {row.ordinal for row in rollouts.trajectories}
        self._put_back = sorted(ordinals.union(self._put_back))

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self._prompts.state_dict(),
            "put_back": list(self._put_back),
            "failures": self._failures.state_dict(),
            "equal_rewards": self._watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._put_back = list(state.get("put_back", ()))
        if "failures" in state:
            self._failures.load_state_dict(state["failures"])
        if "equal_rewards" in state:
            self._watch.load_state_dict(state["equal_rewards"])


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
        )
        for group, (prompt, ordinal) in enumerate(zip(prompts, numbers, strict=True))
        for sample in range(group_size)
    ]
