"""Turns rewards into advantages; pure functions of tensors. Groups are identified by ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDING = 1e-6
"""Rewards of a group are equal if they differ by at most this fraction of their size: this is float noise, and dividing by it
would give advantages in the thousands."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Advantages and statistics of their groups."""

    values: torch.Tensor
    """[B] float32."""
    equal: torch.Tensor
    """[B] bool; True in groups with equal rewards, which have no learning signal."""
    equal_group_frac: float
    """Fraction of such groups."""
    mean_group_std: float
    """Mean over groups of the standard deviation of their rewards."""


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    scored: torch.Tensor | None = None,
    sizes: torch.Tensor | None = None,
) -> GroupAdvantages:
    """Center each reward on its group and, if `normalize`, divide by the group's standard deviation.

    The standard deviation is unbiased and over all rewards of the group, also with `leave_one_out`, because the
    standard deviation of the other rewards can be zero.

    Args:
        rewards: [B] rewards, in any order.
        group_ids: [B] int64; rows of one prompt share an id. Groups of one row get advantage zero.
        normalize: divide by the group's standard deviation (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2).
        leave_one_out: center on the mean of the others (RLOO, https://arxiv.org/abs/2402.14740).
        scored: [B] bool; rows with False count in no statistic and get advantage zero. None if all rows were scored.
        sizes: [B] size of the numbers that each reward was computed from, whose rounding it has; its own by default.
    """
    counts = torch.ones_like(rewards, dtype=torch.bool) if scored is None else scored
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    values = rewards.double()
    size = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, counts.double())
    is_counted = size > 0
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values * counts) / size.clamp(min=1)
    centered = (values - mean[group]) * counts
    variance = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centered.square())
    std = (variance / (size - 1).clamp(min=1)).sqrt()

    highest = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce(
        0, group, values.masked_fill(~counts, -torch.inf), "amax"
    )
    lowest = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce(
        0, group, values.masked_fill(~counts, torch.inf), "amin"
    )
    of = values.abs() if sizes is None else torch.maximum(values.abs(), sizes)
    largest = torch.zeros(num_groups, dtype=torch.float64).scatter_reduce(0, group, of.masked_fill(~counts, 0.0), "amax")
    equal = are_equal(lowest, highest, size=largest) | ~is_counted

    advantages = centered * (size / (size - 1).clamp(min=1))[group] if leave_one_out else centered
    if normalize:
        advantages = advantages / std.masked_fill(equal, 1.0)[group]
    return GroupAdvantages(
        values=advantages.masked_fill(equal[group], 0.0).float(),
        equal=equal[group],
        equal_group_frac=float(equal[is_counted].double().mean()) if bool(is_counted.any()) else 0.0,
        mean_group_std=float(std[is_counted].mean()) if bool(is_counted.any()) else 0.0,
    )


def whiten(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = False) -> torch.Tensor:
    """Values normalized to mean 0 and standard deviation 1 over trained entries, and 0.0 elsewhere.

    If they are all equal up to rounding, all are 0.0.

    Args:
        values: any shape.
        mask: the same shape; above 0 for trained entries.
        unbiased: divide the sum of squares by n - 1 instead of n.
    """
    trained = mask > 0
    selected = values.double()[trained]
    if selected.numel() == 0 or bool(are_equal(selected.min(), selected.max())):
        return torch.zeros_like(values, dtype=torch.float32)
    whitened = (values.double() - selected.mean()) / selected.std(correction=int(unbiased))
    return torch.where(trained, whitened, 0.0).float()


def suffix_sums(values: torch.Tensor) -> torch.Tensor:
    """[B, T] the sum of each row's values from a position to the end."""
    return values.flip(-1).cumsum(-1).flip(-1)


def are_equal(lowest: torch.Tensor, highest: torch.Tensor, *, size: torch.Tensor | None = None) -> torch.Tensor:
    """Whether `lowest` and `highest` are equal up to rounding, elementwise; `size` is that of the larger one by default."""
    largest = torch.maximum(highest.abs(), lowest.abs()) if size is None else size
    return (highest - lowest) <= ROUNDING * largest.clamp(min=1.0)
