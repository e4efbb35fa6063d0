"""Which tokens of a row a context-parallel rank holds, and log-probabilities brought together from all; knows no model.

A row of length L, a multiple of 2n, is cut into 2n chunks; rank r of n has chunks r and 2n-1-r. A late chunk attends to much
and an early one to little, so the pairs cost the same (Megatron-Core's layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def row_shard(length: int, ranks: int, rank: int) -> torch.Tensor:
    """[length / ranks] int64; the positions of a row that the rank holds, in the order in which it holds them.

    Args:
        length: tokens of the row, a multiple of twice the ranks.
        ranks: of the context-parallel group.
        rank: which one.
    """
    chunk = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late * chunk, (late + 1) * chunk)])


def packed_shard(lengths: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """The same for rows that are packed end to end: positions in the whole packed row."""
    parts, start = [], 0
    for length in lengths:
        parts.append(row_shard(length, ranks, rank) + start)
        start += length
    return torch.cat(parts)


def sum_over_ranks(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over a group, where each rank then computes the same from it: gradients come back as they are, not summed.

    Args:
        values: any shape; each rank has its own part filled in, and zeros elsewhere.
        group: the process group.
    """
    total: torch.Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
