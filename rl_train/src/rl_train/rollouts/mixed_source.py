"""Answers that the data gives in place of sampled ones, in the steps that a draw leaves to them; knows no engine."""

from __future__ import annotations

from typing import Any

from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.seeds import sample_seed
from rl_train.rollouts.source import Rollouts, RolloutSource

_ALL = 2**63
"""Seeds are below it."""


class MixedRolloutSource(RolloutSource):
    """A step's rows are the policy's own rollouts with a probability, else conversations of the data as they are.

    Source: https://arxiv.org/abs/2306.13649, algorithm 1, where the probability is lambda, the student data fraction.

    Which it is depends on the seed and the step alone, so that a resumed run decides as one that was never stopped.

    Args:
        sampled: the policy's own rollouts.
        given: draws as many conversations as a step has rows.
        sampled_fraction: the probability, from 0 to 1.
        seed: of the draw.
    """

    def __init__(self, sampled: RolloutSource, given: TrainingBatches, *, sampled_fraction: float, seed: int) -> None:
        self._sampled, self._given = sampled, given
        self._sampled_fraction, self._seed = sampled_fraction, seed

    def samples(self, step: int) -> bool:
        """Whether the policy answers in this step."""
        return sample_seed(self._seed, step) < self._sampled_fraction * _ALL

    def next_batch(self, step: int) -> Rollouts:
        """See `RolloutSource`; given rows have the columns that a loss and a teacher read, and no trajectories."""
        if self.samples(step):
            rollouts = self._sampled.next_batch(step)
            return Rollouts(
                batch=rollouts.batch,
                metrics=rollouts.metrics | {"rollout/sampled": 1.0},
                trajectories=rollouts.trajectories,
            )
        return Rollouts(batch=self._given.next_batch(), metrics={"rollout/sampled": 0.0}, trajectories=[])

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self._sampled.state_dict(), "given": self._given.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampled.load_state_dict(state["sampled"])
        self._given.load_state_dict(state["given"])

    def close(self) -> None:
        self._sampled.close()
