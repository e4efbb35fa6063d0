"""Warns if the samples of each prompt have equal rewards for several steps, which gives no learning signal."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rl_train.rollouts.trajectory import Trajectory

WARN_AFTER = 5
"""Steps in a row after which the warning is logged, once until rewards differ again."""
_ROUNDING = 1e-6
_log = logging.getLogger("rlcore")


class EqualRewardWatch:
    """Counts the steps in which the environment's rewards were equal within every group.

    Rows are compared within their group, or with all rows of the draw if each prompt has one sample.
    """

    def __init__(self) -> None:
        self._equal_steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """The steps with equal rewards, so that a resumed run continues to count them."""
        return {"equal_steps": list(self._equal_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._equal_steps = list(state["equal_steps"])

    def observe(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Check the rollouts of a step, or of one draw; a step with several draws counts as equal if all of them are.

        Args:
            step: the step.
            trajectories: finished rollouts, also of groups that were not selected. Rollouts without any reward are ignored.
        """
        trajectories = [row for row in trajectories if row.scored]
        if not any(row.reward_parts for row in trajectories):
            return
        groups: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
        for row in trajectories:
            groups[row.ordinal].append(row.reward_parts)
        compared = list(groups.values())
        if all(len(group) == 1 for group in compared):
            compared = [[parts for group in compared for parts in group]]
        if len(trajectories) < 2 or not all(_are_equal(group) for group in compared):
            self._equal_steps.clear()
            return
        if step not in self._equal_steps:
            self._equal_steps.append(step)
            if len(self._equal_steps) == WARN_AFTER:
                self._warn(trajectories)

    def _warn(self, trajectories: Sequence[Trajectory]) -> None:
        rewards = sorted({round(row.reward, 6) for row in trajectories})
        shown = ", ".join(f"{reward:g}" for reward in rewards[:3]) + (", ..." if len(rewards) > 3 else "")
        _log.warning(
            "steps %d to %d: the samples of each prompt all had equal rewards (in the last step %s), so there is no learning "
            "signal. Check in rollouts/ that the environment extracts answers. Otherwise use easier or harder prompts, more "
            "samples per prompt, or a higher temperature.",
            self._equal_steps[0],
            self._equal_steps[-1],
            shown,
        )


def _are_equal(group: Sequence[Mapping[str, float]]) -> bool:
    """Whether all rows have the same rewards, name by name, up to rounding; a missing one counts as 0."""
    for name in {name for parts in group for name in parts}:
        values = [parts.get(name, 0.0) for parts in group]
        if max(values) - min(values) > _ROUNDING * max(1.0, *(abs(value) for value in values)):
            return False
    return True
