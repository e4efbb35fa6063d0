"""Sources of an algorithm's rollouts: the interface, and a source that samples on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.equal_rewards import EqualRewardWatch
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
    """Gives an algorithm the rollouts of its next step."""

    @abstractmethod
    def next_batch(self, step: int) -> Rollouts:
        """The rollouts of `step`; all G rows of a prompt are included and share a `group_ids` entry."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position of the source, so that a resumed run draws the same prompts as an uninterrupted one."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""

    def close(self) -> None:
        """Stop background work; may be called repeatedly."""
        return None


class OnDemandSource(RolloutSource):
    """Samples the rollouts of a step on demand, with the current weights of the generation backend.

    Args:
        collector: plays the rollouts.
        prompts: draws P prompts per step.
        group_size: G, samples per prompt.
    """

    def __init__(self, collector: Collector, prompts: BatchedDataLoader, *, group_size: int) -> None:
        self._collector = collector
        self._prompts = prompts
        self._batches = self._prompts.forever()
        self._group_size = group_size
        self._watch = EqualRewardWatch()

    def next_batch(self, step: int) -> Rollouts:
        """See `RolloutSource`; every row has the current weight version of the generation backend."""
        first = self._prompts.next_ordinal
        trajectories = start_rollouts(next(self._batches), self._group_size, first_ordinal=first)
        self._collector.collect(trajectories, stream=SampleStream.TRAINING)
        self._watch.observe(step, trajectories)
        metrics = summarize(trajectories) | ask_environments(trajectories, self._collector.environments)
        return Rollouts(batch=to_batch(trajectories), metrics=metrics, trajectories=trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._batches = self._prompts.forever()


def start_rollouts(prompts: BatchedDataDict[Any], group_size: int, *, first_ordinal: int = 0) -> list[Trajectory]:
    """G rollouts of each prompt, where the G rows of a prompt are consecutive; the group is the prompt's row in the batch.

    Args:
        prompts: P prompts, in the order in which they were drawn.
        group_size: G.
        first_ordinal: the ordinal of the first prompt, see `rl_train.rollouts.seeds.rollout_seed`.
    """
    return [
        Trajectory(
            message_log=[dict(message) for message in prompts["message_log"][row]],
            metadata=prompts["extra_env_info"][row],
            task_name=prompts["task_name"][row],
            group_id=row,
            index=int(prompts["idx"][row]),
            ordinal=first_ordinal + row,
            sample=sample,
            loss_multiplier=float(prompts["loss_multiplier"][row]),
            stop_strings=prompts["stop_strings"][row] if "stop_strings" in prompts else None,
        )
        for row in range(prompts.size)
        for sample in range(group_size)
    ]
