"""Which groups of rollouts may begin, and which make up a batch, so that none becomes too old to be trained.

A step has a demand: the number of groups that it trains on. Two rules hold the bound `max_staleness`, in steps:

1. Groups that have begun and are in no batch yet number at most the demand of the steps from the next batch up to the step of
   the engine's weights plus `ahead`. A batch makes space only with the refit of its step.
2. A batch contains every group that could otherwise no longer be trained in time: of those begun k or more steps before a later
   step w, the steps up to w must have space for all.

Then every group can be trained within the bound whatever the order in which groups end, so none is ever dropped because it is
too old. The rules count groups that are alive, not totals, so groups that are dropped, short batches and steps without demand
need no special case. Only with `oversampling`, more groups may begin than steps can train on; those that no step needs within
the bound are surplus, whatever their length.

The bound is checked in every batch, from the versions of its tokens. Metrics that are means over tokens are split into those of
tokens that the current weights sampled, and of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError


@dataclass(kw_only=True)
class Schedule:
    """The groups that have begun and are in no batch yet.

    Attributes:
        max_staleness: k, the largest number of steps between the weights that sample a group and the step that trains it.
        ahead: number of batches that are begun beyond the one in training; at most k.
        demand: number of groups of a step.
        next_step: the step of the next batch.
        weights_step: the step whose refit delivered the engine's weights.
        exact: whether a batch has the groups that began first, instead of those that ended first.
        oversampling: number of groups that begin for each missing one, at least 1, if some of them will be dropped.
    """

    max_staleness: int
    ahead: int
    demand: Callable[[int], int]
    exact: bool = False
    next_step: int = 1
    weights_step: int = 0
    oversampling: float = 1.0
    _size: int = 0
    """Number of groups of the next batch."""
    _began: dict[int, int] = field(default_factory=dict)
    """By group: the step of the weights with which it began."""
    _ended: dict[int, None] = field(default_factory=dict)
    """The groups that have ended, in that order."""

    @property
    def in_progress(self) -> list[int]:
        """The groups that have not ended, in the order in which they began."""
        return [group for group in self._began if group not in self._ended]

    @property
    def ended(self) -> list[int]:
        """The groups that have ended and are in no batch yet, in the order in which they ended."""
        return list(self._ended)

    @property
    def space(self) -> int:
        """Number of groups that may begin now."""
        limit = sum(self._demand(step) for step in range(self.next_step, self.weights_step + self.ahead + 1))
        missing = limit - len(self._ended)
        return max(math.ceil(missing * self.oversampling) - len(self.in_progress), 0)

    @property
    def surplus(self) -> list[int]:
        """The groups that the next step would train beyond the bound; only with `oversampling`."""
        return [group for group, began in self._began.items() if began < self.next_step - self.max_staleness]

    def _demand(self, step: int) -> int:
        return self._size if step == self.weights_step else self.demand(step)

    def steps_of_next(self, count: int) -> list[int]:
        """The steps that would train the next `count` groups if groups were trained in the order in which they begin."""
        slots = [step for step in range(self.next_step, self.weights_step + self.ahead + 1) for _ in range(self._demand(step))]
        first = len(self._began)
        return [slots[min(number, len(slots) - 1)] for number in range(first, first + count)]

    def limits(self) -> dict[str, Any]:
        """What determines how many groups may be alive before the next step."""
        demand = [self.demand(self.next_step + later) for later in range(self.max_staleness + 1)]
        return {"max_staleness": self.max_staleness, "ahead": self.ahead, "demand": demand}

    def begin(self, group: int, *, at: int | None = None) -> None:
        """A group begins with the engine's current weights, or began with those of step `at`."""
        self._began[group] = self.weights_step if at is None else at

    def began(self, group: int) -> int:
        """The step of the weights with which a group began."""
        return self._began[group]

    def end(self, group: int) -> None:
        """A group has ended."""
        self._ended[group] = None

    def drop(self, group: int) -> None:
        """A group will be in no batch, so another one may begin."""
        del self._began[group]
        self._ended.pop(group, None)

    def refit(self, step: int, groups: int) -> None:
        """The engine has the weights that step `step` starts with, and the next batch has `groups` groups of that step.

        Without staleness, a step may take several batches of any size; otherwise, it takes one with the groups of its demand.
        """
        self.weights_step = self.next_step = step
        self._size = groups

    def batch(self, *, short: bool = False) -> list[int] | None:
        """The groups of the next step, those that must be in it first; None until enough of them have ended.

        Args:
            short: accept fewer groups, but not without those that must be in it.
        """
        size = self._size
        if self.exact:
            first = sorted(self._began, key=lambda group: (self._began[group], group))[:size]
            return first if len(first) == size and self._ended.keys() >= set(first) else None
        due = self._due()
        if due is None:
            return None
        if len(due) > size and self.oversampling > 1:
            due = sorted(due)[:size]  # not in the order in which they ended, which would prefer short rollouts
        if len(due) > size:
            raise RLCoreError(
                f"Step {self.next_step} trains on {size} groups, but {len(due)} groups would exceed the staleness bound of "
                f"{self.max_staleness} steps after it. This is an error in rl_train.rollouts.schedule, or the number of groups "
                "of a step has changed."
            )
        chosen = due + [group for group in self._ended if group not in due][: size - len(due)]
        return chosen if len(chosen) == size or short else None

    def take(self, groups: list[int]) -> None:
        """These groups are the batch of the next step."""
        for group in groups:
            self.drop(group)
        self.next_step += 1

    def _due(self) -> list[int] | None:
        """The groups that later steps have no space for; None while too few of them have ended."""
        chosen: list[int] = []
        later = 0
        last = self.next_step + (self.max_staleness if self.oversampling == 1 else 0)  # surplus groups need no space
        for step in range(self.next_step, last + 1):
            later += self._demand(step) if step > self.next_step else 0
            old = {group for group, began in self._began.items() if began <= step - self.max_staleness}
            needed = len(old) - later - len(old.intersection(chosen))
            if needed > 0:
                ended = [group for group in self._ended if group in old and group not in chosen]
                if len(ended) < needed:
                    return None
                chosen += ended[:needed]
        return chosen


def staleness(batch: BatchedDataDict[Any], version: int) -> torch.Tensor:
    """[N] int64: the version being trained minus the oldest version of a trained token, for the N rows that have one.

    Args:
        batch: rollouts with `token_versions`, `token_mask` and `sample_mask`.
        version: the weight version that the step starts with.
    """
    newest = torch.iinfo(torch.int64).max
    oldest = torch.where(trained_tokens(batch), batch["token_versions"], newest).amin(-1)
    return version - oldest[oldest < newest]


def staleness_metrics(batch: BatchedDataDict[Any], version: int) -> dict[str, float]:
    """`staleness/mean` and `staleness/max` over rows; none for rows that were not sampled, such as answers of the data."""
    if "token_versions" not in batch:
        return {}
    lags = staleness(batch, version)
    return {"staleness/mean": float(lags.double().mean()), "staleness/max": float(lags.max())} if len(lags) else {}


def refuse_other_versions(batch: BatchedDataDict[Any], began: Sequence[int]) -> None:
    """With exact batches, every token of a group has the weights with which the group began.

    Args:
        batch: rollouts with `token_versions`, `token_mask` and `rollout_ids`.
        began: weight version of each rollout when it began; -1 if it is unknown.

    Raises:
        RLCoreError: a token has other weights.
    """
    expected = torch.tensor(began)[batch["rollout_ids"]].unsqueeze(-1)
    others = (batch["token_mask"] > 0) & (batch["token_versions"] != expected) & (expected >= 0)
    if bool(others.any()):
        raise RLCoreError(
            f"rollout.order is exact, but rollouts that began with weight version {int(expected[others.any(-1)][0])} have "
            f"tokens of version {int(batch['token_versions'][others][0])}: a generation worker was restarted after the policy "
            "had been trained. Resume the run from its last checkpoint."
        )


class DeliveredVersions:
    """The weight versions with which rows may have been sampled, and the steps whose refits delivered them.

    The staleness of a token is the step that trains it minus the last step whose refit delivered the weights that sampled it.
    It is counted in steps, because a step may take several optimizer steps or none.

    Args:
        max_staleness: the bound.
        weight_version: the version of the engine's weights.
    """

    def __init__(self, max_staleness: int, weight_version: Callable[[], int | None]) -> None:
        self._max_staleness, self._weight_version = max_staleness, weight_version
        self._steps: dict[int | None, int] = {}

    def state_dict(self) -> list[list[int | None]]:
        """Versions with their steps, as JSON."""
        return [[version, step] for version, step in self._steps.items()]

    def load_state_dict(self, state: Sequence[tuple[int | None, int]]) -> None:
        """Continue from `state_dict`."""
        self._steps = dict(state)

    def record(self, step: int) -> None:
        """The engine now has the weights that `step` starts with; forget those that are too old."""
        self._steps[self._weight_version()] = step
        self._steps = {version: at for version, at in self._steps.items() if at >= step - self._max_staleness}

    def staleness(self, batch: BatchedDataDict[Any], step: int) -> dict[str, float]:
        """`staleness/steps_mean` and `_max` over rows, of the oldest token of each, and `rollout/mixed_version_frac`.

        Args:
            batch: rollouts with `token_versions` and `token_mask`.
            step: the step that trains them.

        Raises:
            RLCoreError: a token exceeds the bound.
        """
        sampled = batch["token_mask"] > 0
        versions = torch.where(sampled, batch["token_versions"], torch.iinfo(torch.int64).max)
        for version in versions[sampled].unique().tolist():
            if version not in self._steps:
                raise RLCoreError(
                    f"Step {step} would train on tokens that weight version {version} sampled, but rollout.max_staleness "
                    f"({self._max_staleness}) allows only the versions of the engine since step "
                    f"{max(step - self._max_staleness, 0)}: {', '.join(map(str, self._steps))}. The engine reports "
                    "wrong versions, or the scheduler exceeded its bound."
                )
        lags = [float(step - self._steps[oldest]) for oldest in versions.amin(-1).tolist() if oldest in self._steps]
        if not lags:
            return {}
        newest = torch.where(sampled, batch["token_versions"], -1).amax(-1)
        mixed = int((newest > versions.amin(-1)).sum())
        return {
            "staleness/steps_mean": sum(lags) / len(lags),
            "staleness/steps_max": max(lags),
            "rollout/mixed_version_frac": mixed / len(lags),
        }


def trained_tokens(data: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] bool: the tokens that a loss counts."""
    trained: torch.Tensor = (data["token_mask"] > 0) & (data["sample_mask"] > 0).unsqueeze(-1)
    return trained


def stale_mask(batch: BatchedDataDict[Any], version: int) -> torch.Tensor | None:
    """[B, T] float32: 1 on trained tokens that were sampled with other weights than those of `version`; None without any."""
    if "token_versions" not in batch:
        return None
    is_stale = trained_tokens(batch) & (batch["token_versions"] >= 0) & (batch["token_versions"] != version)
    return is_stale.float() if bool(is_stale.any()) else None
