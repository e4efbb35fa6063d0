"""How many prompts have samples with equal rewards, which give no learning signal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rl_train.rollouts.trajectory import Trajectory

_ROUNDING = 1e-6


def equal_groups_frac(trajectories: Sequence[Trajectory]) -> float | None:
    """The fraction of groups in which the environment's rewards are equal, name by name; None without rewards to compare.

    Rows are compared within their group, or with all rows if each prompt has one sample.

    Args:
        trajectories: finished rollouts. Rollouts that were not scored are ignored.
    """
    rows = [row for row in trajectories if row.scored]
    if len(rows) < 2 or not any(row.reward_parts for row in rows):
        return None
    groups: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for row in rows:
        groups[row.ordinal].append(row.reward_parts)
    compared = list(groups.values())
    if all(len(group) == 1 for group in compared):
        compared = [[parts for group in compared for parts in group]]
    return sum(map(_are_equal, compared)) / len(compared)


def _are_equal(group: Sequence[Mapping[str, float]]) -> bool:
    """Whether all rows have the same rewards, name by name, up to rounding; a missing one counts as 0."""
    for name in {name for parts in group for name in parts}:
        values = [parts.get(name, 0.0) for parts in group]
        if max(values) - min(values) > _ROUNDING * max(1.0, *(abs(value) for value in values)):
            return False
    return True
