"""Checks in the first step that every weight of `env.<task>.reward_weights` has the name of a reward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean
from rl_train.rollouts.trajectory import Trajectory


class RewardWeightCheck:
    """Checks each task once, with its first scored rollouts.

    Args:
        reward_names: rewards that a task may return later, by task.
    """

    def __init__(self, reward_names: Mapping[str, Collection[str]]) -> None:
        self._reward_names = reward_names
        self._checked: set[str] = set()

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Check the tasks that were not checked before.

        Args:
            trajectories: finished rollouts of one draw.

        Raises:
            ConfigError: a weight has the name of no reward.
        """
        scored = [row for row in trajectories if row.scored and row.task_name not in self._checked]
        for task in dict.fromkeys(row.task_name for row in scored):
            rows = [row for row in scored if row.task_name == task]
            names = sorted({name for row in rows for name in row.reward_parts} | set(self._reward_names.get(task, ())))
            unknown = sorted(set(rows[0].reward_weights) - set(names))
            if unknown:
                error = ConfigError(
                    f"`reward_weights` of the task {task!r} has the name {unknown[0]!r}, but the environment returned the "
                    f"rewards {', '.join(names) or 'none'}.{did_you_mean(unknown[0], names)} An environment must return every "
                    "weighted reward in the first step, with 0.0 for rows without it."
                )
                error.key = f"env.{task}.reward_weights"
                raise error
            self._checked.add(task)
