"""Recorded rollouts of another run, instead of sampled ones: the same batches with the same log-probabilities and versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import UserError
from rl_train.metrics.jsonl import read_jsonl
from rl_train.rollouts.records import recorded_rollout
from rl_train.rollouts.source import Rollouts, RolloutSource, Selection
from rl_train.rollouts.summary import summarize
from rl_train.rollouts.trajectory import to_batch


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
