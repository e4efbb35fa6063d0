"""Mixes dataset answers into on-policy rollouts (GKD's student data fraction)."""

from __future__ import annotations

from typing import Any

from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.seeds import sample_seed
from rl_train.rollouts.source import Rollouts, RolloutSource

_SEED_LIMIT = 2**63
"""Upper bound of seeds."""


class MixedRolloutSource(RolloutSource):
    """The rows of a step are the policy's rollouts with a given probability, otherwise conversations of the data.

    Source: https://arxiv.org/abs/2306.13649, algorithm 1, where the probability is lambda, the student data fraction.

    The choice only depends on the seed and the step, so a resumed run makes the same choices as an uninterrupted one.

    Args:
        sampled: the policy's rollouts.
        dataset: the conversations.
        group_size: G, number of conversations that replace a group.
        sampled_fraction: the probability, from 0 to 1.
        seed: seed of the choices.
    """

    def __init__(
        self, sampled: RolloutSource, dataset: TrainingBatches, *, group_size: int, sampled_fraction: float, seed: int
    ) -> None:
        self._sampled, self._dataset, self._group_size = sampled, dataset, group_size
        self._sampled_fraction, self._seed = sampled_fraction, seed

    def samples(self, step: int) -> bool:
        """Whether this step uses sampled rollouts."""
        return sample_seed(self._seed, step) < self._sampled_fraction * _SEED_LIMIT

    def take(self, step: int, groups: int) -> Rollouts:
        """Rollouts of a step: sampled, or from the data with the keys that a loss and a teacher need, without trajectories."""
        if self.samples(step):
            rollouts = self._sampled.take(step, groups)
            return Rollouts(
                batch=rollouts.batch,
                metrics=rollouts.metrics | {"rollout/sampled": 1.0},
                trajectories=rollouts.trajectories,
            )
        batch = self._dataset.take(groups * self._group_size)
        return Rollouts(batch=batch, metrics={"rollout/sampled": 0.0}, trajectories=[])

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self._sampled.state_dict(), "given": self._dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampled.load_state_dict(state["sampled"])
        self._dataset.load_state_dict(state["given"])

    def close(self) -> None:
        self._sampled.close()
