"""Decides which finished rollouts are correct, according to their environments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.interfaces.environment import EnvironmentInterface
from rl_train.rollouts.summary import environment_metrics
from rl_train.rollouts.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Correctness of B rollouts."""

    correct: Sequence[bool | None]
    """One entry per rollout; None if unknown."""
    unknown: Mapping[str, str]
    """Reason why correctness is unknown, by task."""


def correct_rollouts(
    rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface], *, reward_above: float | None = None
) -> Accuracy:
    """Whether each rollout is correct: its environment reports an `accuracy` of 1 for it.

    The environment is called because a reward alone does not show correctness (it may reward the format of a wrong answer). It
    is called for all rows with equal rewards at once, and row by row only if the accuracy of those is neither 0 nor 1.

    Args:
        rows: B finished rollouts.
        environments: by task name.
        reward_above: rollouts with a higher reward count as correct; the environment is not called.
    """
    if reward_above is not None:
        return Accuracy(correct=[row.reward > reward_above for row in rows], unknown={})
    correct: list[bool | None] = [None] * len(rows)
    unknown: dict[str, str] = {}
    for task_name in dict.fromkeys(row.task_name for row in rows):
        indices = [i for i, row in enumerate(rows) if row.task_name == task_name]
        if not all(rows[i].scored for i in indices):
            unscored = sum(not rows[i].scored for i in indices)
            unknown[task_name] = f"{unscored} of {len(indices)} rollouts could not be scored"
            continue
        try:
            grades = _grades([rows[i] for i in indices], environments)
        except NoAccuracyError as error:
            unknown[task_name] = str(error)
            continue
        for index, grade in zip(indices, grades, strict=True):
            correct[index] = grade
    return Accuracy(correct=correct, unknown=unknown)


class NoAccuracyError(Exception):
    """The environment does not report whether rows are correct."""


def _grades(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> list[bool]:
    same_rewards: defaultdict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        same_rewards[tuple(sorted(row.reward_parts.items()))].append(i)
    grades = [False] * len(rows)
    for indices in same_rewards.values():
        accuracy = _accuracy([rows[i] for i in indices], environments)
        for i in indices:
            single = accuracy if accuracy in (0.0, 1.0) else _accuracy([rows[i]], environments)
            if single not in (0.0, 1.0):
                raise NoAccuracyError(f"the environment's accuracy of one sample is {single:g}, neither 0 nor 1")
            grades[i] = single == 1.0
    return grades


def _accuracy(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> float:
    metrics = environment_metrics(rows, environments)
    if "rollout/accuracy" not in metrics:
        raise NoAccuracyError("the environment reports no accuracy")
    return metrics["rollout/accuracy"]
