"""Sources of an algorithm's rollouts: the interface, and a source that samples on demand."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.equal_rewards import EqualRewardWatch
from rl_train.rollouts.reward_weights import RewardWeightCheck
from rl_train.rollouts.seeds import SampleStream
from rl_train.rollouts.summary import ask_environments, summarize
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
    """

    def __init__(
        self,
        collector: Collector,
        prompts: BatchedDataLoader,
        *,
        group_size: int,
        reward_names: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._collector = collector
        self._prompts = prompts
        self._put_back: list[int] = []
        self._group_size = group_size
        self._watch = EqualRewardWatch()
        self._weights = RewardWeightCheck(reward_names or {})

    def take(self, step: int, groups: int) -> Rollouts:
        """See `RolloutSource`; every row has the current weight version of the generation backend."""
        ordinals, self._put_back = self._put_back[:groups], self._put_back[groups:]
        ordinals += self._prompts.draw(groups - len(ordinals))
        trajectories = start_rollouts(self._prompts.rows_of(ordinals), self._group_size, ordinals=ordinals)
        self._collector.collect(trajectories, stream=SampleStream.TRAINING)
        self._weights.check(trajectories)
        self._watch.observe(step, trajectories)
        metrics = summarize(trajectories) | ask_environments(trajectories, self._collector.environments)
        return Rollouts(batch=to_batch(trajectories), metrics=metrics, trajectories=trajectories)

    def put_back(self, rollouts: Rollouts) -> None:
        """See `RolloutSource`."""
        ordinals = {row.ordinal for row in rollouts.trajectories}
        self._put_back = sorted(ordinals.union(self._put_back))

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict(), "put_back": list(self._put_back)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._put_back = list(state.get("put_back", ()))


def start_rollouts(
    prompts: BatchedDataDict[Any], group_size: int, *, ordinals: Sequence[int] | None = None
) -> list[Trajectory]:
    """G rollouts of each prompt, where the G rows of a prompt are consecutive; the group is the prompt's row in the batch.

    Args:
        prompts: P prompts.
        group_size: G.
        ordinals: P ordinals, see `rl_train.rollouts.seeds.rollout_seed`; 0 to P - 1 by default.
    """
    numbers = range(prompts.size) if ordinals is None else ordinals
    return [
        Trajectory(
            message_log=[dict(message) for message in prompts["message_log"][row]],
            metadata=copy.deepcopy(prompts["extra_env_info"][row]),  # an environment may change it in place
            task_name=prompts["task_name"][row],
            group_id=row,
            index=int(prompts["idx"][row]),
            ordinal=numbers[row],
            sample=sample,
            loss_multiplier=float(prompts["loss_multiplier"][row]),
            stop_strings=prompts["stop_strings"][row] if "stop_strings" in prompts else None,
            tools=prompts["tools"][row] if "tools" in prompts else None,
        )
        for row in range(prompts.size)
        for sample in range(group_size)
    ]
