"""From rewards to advantages: pure functions of tensors; a group is its id, never its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDING = 1e-6
"""Rewards of a group that differ by no more than this share of their size are equal: the rest is float noise, and dividing
by it would turn noise into advantages of thousands."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """Advantages, and what their groups looked like."""

    values: torch.Tensor
    """[B] float32."""
    equal: torch.Tensor
    """[B] bool; True in groups whose rewards are all equal: they teach nothing."""
    equal_group_frac: float
    """Share of such groups."""
    mean_group_std: float
    """Mean over groups of the standard deviation of their rewards."""


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
) -> GroupAdvantages:
    """Centre each reward on its group and, if asked, divide by the group's standard deviation.

    The deviation is one number a group (unbiased, over all its rewards), also with `leave_one_out`, so that the odd reward of
    a group is not divided by the spread of the others, which can be zero.

    Args:
        rewards: [B] rewards, in any order.
        group_ids: [B] int64; rows of one prompt share an id. Groups of one row get advantage zero.
        normalize: divide by the group's standard deviation (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2).
        leave_one_out: centre on the mean of the others (RLOO, https://arxiv.org/abs/2402.14740).
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    values = rewards.double()
    size = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, torch.ones_like(values))
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values) / size
    centred = values - mean[group]
    variance = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centred.square())
    std = (variance / (size - 1).clamp(min=1)).sqrt()

    highest = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, values, "amax")
    lowest = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, group, values, "amin")
    equal = are_equal(lowest, highest)

    advantages = centred * (size / (size - 1).clamp(min=1))[group] if leave_one_out else centred
    if normalize:
        advantages = advantages / std.masked_fill(equal, 1.0)[group]
    return GroupAdvantages(
        values=advantages.masked_fill(equal[group], 0.0).float(),
        equal=equal[group],
        equal_group_frac=float(equal.double().mean()) if num_groups else 0.0,
        mean_group_std=float(std.mean()) if num_groups else 0.0,
    )


def whiten(values: torch.Tensor, mask: torch.Tensor, *, unbiased: bool = False) -> torch.Tensor:
    """Values with mean 0 and standard deviation 1 over all that is trained, and 0.0 elsewhere.

    Where they are all equal up to rounding, all are 0.0.

    Args:
        values: of any shape.
        mask: of the same shape; above 0 where trained.
        unbiased: divide the sum of squares by n - 1 instead of n.
    """
    trained = mask > 0
    picked = values.double()[trained]
    if picked.numel() == 0 or bool(are_equal(picked.min(), picked.max())):
        return torch.zeros_like(values, dtype=torch.float32)
    whitened = (values.double() - picked.mean()) / picked.std(correction=int(unbiased))
    return torch.where(trained, whitened, 0.0).float()


def from_here_on(values: torch.Tensor) -> torch.Tensor:
    """[B, T] the sum of each row's values at a position and all behind it."""
    return values.flip(-1).cumsum(-1).flip(-1)


def are_equal(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Whether numbers between these differ by no more than rounding; elementwise."""
    size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return (highest - lowest) <= ROUNDING * size
