"""What an advantage estimator is, and statistics of the groups of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict

ROUNDING = 1e-6
"""Rewards of a group are equal if they differ by at most this fraction of their size: this is float noise, and dividing by it
would give advantages in the thousands."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of a batch."""

    values: torch.Tensor
    """[B, T] float32; 0.0 where `token_mask` is 0."""
    metrics: dict[str, float]
    """Statistics of rewards and advantages."""


class AdvantageEstimator(ABC):
    """Estimates advantages from `rewards`, `group_ids`, `token_mask`, `sample_mask` and further keys of a batch.

    A row is a rollout: if rollouts have several segments, their tokens follow one another in the row, see
    `rl_train.rollouts.trajectory`.
    """

    @abstractmethod
    def __call__(self, batch: BatchedDataDict[Any]) -> Advantages:
        """The advantages of a step's rows."""

    def is_informative(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """[B] bool: False for rows of groups without a learning signal, which dynamic sampling replaces."""
        return ~per_group(batch["rewards"], batch["group_ids"], scored_R=batch.get("scored")).equal_R


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Statistics of the groups of R rollouts, each at the rows of its group."""

    mean_R: torch.Tensor
    """float64: the mean of the group's rewards."""
    std_R: torch.Tensor
    """float64: the unbiased standard deviation of the group's rewards; 0.0 for a single one."""
    size_R: torch.Tensor
    """float64: the number of rewards of the group."""
    equal_R: torch.Tensor
    """bool: True if the rewards of the group are equal up to rounding, or none was scored."""
    equal_group_frac: float
    """Fraction of groups with equal rewards."""
    mean_group_std: float
    """Mean of `std_R` over groups."""


def per_group(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,
    *,
    scored_R: torch.Tensor | None = None,
    sizes_R: torch.Tensor | None = None,
) -> GroupStatistics:
    """Statistics of each group.

    Args:
        rewards_R: rewards, in any order.
        groups_R: int64; rollouts of one prompt share an id.
        scored_R: bool; rollouts with False count in no statistic. None if all were scored.
        sizes_R: size of the numbers that each reward was computed from, whose rounding it has; its own by default.
    """
    counts = torch.ones_like(rewards_R, dtype=torch.bool) if scored_R is None else scored_R
    _, group = torch.unique(groups_R, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=torch.float64)
    values = rewards_R.double()
    size = zeros.index_add(0, group, counts.double())
    mean = zeros.index_add(0, group, values * counts) / size.clamp(min=1)
    std = (zeros.index_add(0, group, ((values - mean[group]) * counts).square()) / (size - 1).clamp(min=1)).sqrt()

    highest = (zeros - torch.inf).scatter_reduce(0, group, values.masked_fill(~counts, -torch.inf), "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, group, values.masked_fill(~counts, torch.inf), "amin")
    of = values.abs() if sizes_R is None else torch.maximum(values.abs(), sizes_R)
    largest = zeros.scatter_reduce(0, group, of.masked_fill(~counts, 0.0), "amax")
    is_counted = size > 0
    equal = are_equal(lowest, highest, size=largest) | ~is_counted
    has_any = bool(is_counted.any())
    return GroupStatistics(
        mean_R=mean[group],
        std_R=std[group],
        size_R=size[group],
        equal_R=equal[group],
        equal_group_frac=float(equal[is_counted].double().mean()) if has_any else 0.0,
        mean_group_std=float(std[is_counted].mean()) if has_any else 0.0,
    )


def are_equal(lowest: torch.Tensor, highest: torch.Tensor, *, size: torch.Tensor | None = None) -> torch.Tensor:
    """Whether `lowest` and `highest` are equal up to rounding, elementwise; `size` is that of the larger one by default."""
    largest = torch.maximum(highest.abs(), lowest.abs()) if size is None else size
    return (highest - lowest) <= ROUNDING * largest.clamp(min=1.0)
