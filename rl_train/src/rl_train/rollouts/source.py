"""The sources of rollouts: their interface, recorded rollouts of another run, and a mixture with answers of the data."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import UserError
from rl_train.data.messages import DatumSpec
from rl_train.metrics.jsonl import read_jsonl
from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.records import recorded_rollout, summarize
from rl_train.rollouts.trajectory import Trajectory, sample_seed, to_batch


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

    def load_files(self, folder: Path, *, config_changed: bool = False) -> None:
        """Continue from `save_files`, after `load_state_dict`.

        Args:
            folder: it may not exist.
            config_changed: whether the config, or what it refers to, has changed since then.
        """
        return None

    def close(self) -> None:
        """Stop background work; may be called repeatedly."""
        return None


def start_rollouts(
    prompts: Sequence[DatumSpec], group_size: int, *, ordinals: Sequence[int] | None = None, with_baseline: bool = False
) -> list[Trajectory]:
    """G rollouts of each prompt, where the G rows of a prompt are consecutive; the group is the position of the prompt.

    Args:
        prompts: P prompts.
        group_size: G.
        ordinals: P ordinals, see `rl_train.rollouts.trajectory.rollout_seed`; 0 to P - 1 by default.
        with_baseline: whether another row follows the G rows of each prompt, see `is_baseline`.
    """
    numbers = range(len(prompts)) if ordinals is None else ordinals
    samples = [*range(group_size), *([-1] if with_baseline else [])]
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
        for sample in samples
    ]


def is_baseline(rollout: Trajectory) -> bool:
    """Whether it is decoded greedily, only to compare its reward with those of the samples of its prompt."""
    return rollout.sample < 0


def compared_samples(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
    """The samples of finished groups, which now have the rewards of the baselines of their groups, if there are any."""
    baselines = {row.ordinal: row.reward for row in rollouts if is_baseline(row)}
    samples = [row for row in rollouts if not is_baseline(row)]
    for row in samples:
        row.baseline_reward = baselines.get(row.ordinal)
    return samples


class ReplaySource(RolloutSource):
    """The groups that another run trained on, step by step.

    Args:
        run: its folder, with `rollouts/step_NNNNNN.jsonl`.
        group_size: G, samples per prompt.
        reward_weights: weights of named rewards that are not 1, by task name.
    """

    def __init__(self, run: Path, *, group_size: int, reward_weights: Mapping[str, Mapping[str, float]]) -> None:
        self._run, self._group_size, self._reward_weights = run, group_size, reward_weights

    def take(self, step: int, groups: int, selection: Selection | None = None) -> Rollouts:
        """The recorded groups of a step; the selection was made when they were recorded.

        Raises:
            UserError: the run did not record all of them.
        """
        path = self._run / "rollouts" / f"step_{step:06d}.jsonl"
        records = read_jsonl(path)
        most = groups * self._group_size
        is_complete = len(records) == most if selection is None else 0 < len(records) <= most
        if not is_complete or len(records) % self._group_size:
            raise UserError(
                f"--replay: {path} has {len(records)} rollouts, but step {step} trains on {groups} groups of "
                f"{self._group_size}. Replay a run of this config that recorded all rollouts "
                "(logger.num_rollouts_logged: null), and no step beyond its last one."
            )
        if "ordinal" not in records[0]:
            raise UserError(
                f"--replay: {path} was written by a version that rounded log-probabilities, so it cannot be replayed."
            )
        rollouts = [recorded_rollout(record, self._reward_weights.get(record["task"], {})) for record in records]
        return Rollouts(batch=to_batch(rollouts), metrics=summarize(rollouts), trajectories=rollouts)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step determines the rollouts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


_SEED_LIMIT = 2**63
"""Upper bound of seeds."""


@dataclass(frozen=True, kw_only=True)
class SampledSteps:
    """Which steps use sampled rollouts.

    The choice only depends on the seed and the step, so a resumed run makes the same choices as an uninterrupted one.

    Attributes:
        seed: seed of the choices.
        fraction: probability that a step samples, from 0 to 1.
    """

    seed: int
    fraction: float

    def __call__(self, step: int) -> bool:
        return sample_seed(self.seed, step) < self.fraction * _SEED_LIMIT


class MixedRolloutSource(RolloutSource):
    """The rows of a step are the policy's rollouts with a given probability, otherwise conversations of the data.

    Source: https://arxiv.org/abs/2306.13649, algorithm 1, where the probability is lambda, the student data fraction.

    Args:
        sampled: the policy's rollouts.
        dataset: the conversations.
        group_size: G, number of conversations that replace a group.
        samples: whether a step uses sampled rollouts.
    """

    def __init__(
        self, sampled: RolloutSource, dataset: TrainingBatches, *, group_size: int, samples: Callable[[int], bool]
    ) -> None:
        self._sampled, self._dataset, self._group_size, self._samples = sampled, dataset, group_size, samples

    def take(self, step: int, groups: int, selection: Selection | None = None) -> Rollouts:
        """Rollouts of a step: sampled, or from the data with the keys that a loss and a teacher need, without trajectories."""
        if self._samples(step):
            rollouts = self._sampled.take(step, groups, selection)
            return Rollouts(
                batch=rollouts.batch,
                metrics=rollouts.metrics | {"rollout/sampled": 1.0},
                trajectories=rollouts.trajectories,
            )
        self._sampled.skip(step)
        batch = self._dataset.take(groups * self._group_size)
        return Rollouts(batch=batch, metrics={"rollout/sampled": 0.0}, trajectories=[])

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self._sampled.state_dict(), "given": self._dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampled.load_state_dict(state["sampled"])
        self._dataset.load_state_dict(state["given"])

    def end_rollouts(self) -> None:
        self._sampled.end_rollouts()

    def save_files(self, folder: Path) -> None:
        self._sampled.save_files(folder)

    def load_files(self, folder: Path, *, config_changed: bool = False) -> None:
        self._sampled.load_files(folder, config_changed=config_changed)

    def close(self) -> None:
        self._sampled.close()
