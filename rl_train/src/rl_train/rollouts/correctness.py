"""Which finished rollouts are right, as their environments have it; knows no rewards' meaning and no estimators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.interfaces.environment import EnvironmentInterface
from rl_train.rollouts.summary import ask_environments
from rl_train.rollouts.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What is known of B rollouts."""

    right: Sequence[bool | None]
    """Of each; None where nobody says."""
    unjudged: Mapping[str, str]
    """Task to why nobody says."""


def judge(
    rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface], *, reward_above: float | None = None
) -> Accuracy:
    """Whether each rollout is right: where the environment's `accuracy` of it alone is 1.

    What a reward means only its environment knows (one may pay for the format of a wrong answer), so it is asked. It is asked
    of all rows of equal rewards at once, and row by row only where its answer for those is neither 0 nor 1.

    Args:
        rows: B finished rollouts.
        environments: by task name.
        reward_above: call right what has more reward than that, and ask nobody.
    """
    if reward_above is not None:
        return Accuracy(right=[row.reward > reward_above for row in rows], unjudged={})
    right: list[bool | None] = [None] * len(rows)
    unjudged: dict[str, str] = {}
    for task_name in dict.fromkeys(row.task_name for row in rows):
        places = [i for i, row in enumerate(rows) if row.task_name == task_name]
        try:
            verdicts = _verdicts([rows[i] for i in places], environments)
        except NoAccuracyError as error:
            unjudged[task_name] = str(error)
            continue
        for place, verdict in zip(places, verdicts, strict=True):
            right[place] = verdict
    return Accuracy(right=right, unjudged=unjudged)


class NoAccuracyError(Exception):
    """The environment does not call its rows right or wrong."""


def _verdicts(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> list[bool]:
    alike: defaultdict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        alike[tuple(sorted(row.reward_parts.items()))].append(i)
    verdicts = [False] * len(rows)
    for places in alike.values():
        accuracy = _accuracy([rows[i] for i in places], environments)
        for i in places:
            alone = accuracy if accuracy in (0.0, 1.0) else _accuracy([rows[i]], environments)
            if alone not in (0.0, 1.0):
                raise NoAccuracyError(f"the environment's accuracy of one sample is {alone:g}, neither 0 nor 1")
            verdicts[i] = alone == 1.0
    return verdicts


def _accuracy(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> float:
    found = ask_environments(rows, environments)
    if "rollout/accuracy" not in found:
        raise NoAccuracyError("the environment reports no accuracy")
    return found["rollout/accuracy"]
