"""Mixes dataset answers into on-policy rollouts (GKD's student data fraction)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.seeds import sample_seed
from rl_train.rollouts.source import Rollouts, RolloutSource, Selection

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

    def load_files(self, folder: Path) -> None:
        self._sampled.load_files(folder)

    def close(self) -> None:
        self._sampled.close()
