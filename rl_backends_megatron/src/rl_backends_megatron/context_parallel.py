"""Distribution of a row's tokens over context-parallel ranks, and summation of their log-probabilities.

A row of length L, a multiple of 2n, is split into 2n chunks; rank r of n has chunks r and 2n-1-r. Late chunks attend to many
tokens and early ones to few, so all pairs cost the same (Megatron-Core's layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def row_shard(length: int, ranks: int, rank: int) -> torch.Tensor:
    """[length / ranks] int64, positions of a row on the rank, in the order of its tensors.

    Args:
        length: tokens of the row, a multiple of twice the number of ranks.
        ranks: size of the context-parallel group.
        rank: rank in the group.
    """
    chunk = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late * chunk, (late + 1) * chunk)])


def packed_shard(lengths: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """As `row_shard` for rows packed end to end: positions in the packed row."""
    shards, start = [], 0
    for length in lengths:
        shards.append(row_shard(length, ranks, rank) + start)
        start += length
    return torch.cat(shards)


def sum_over_ranks(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over a group whose ranks compute the same result from it; gradients are passed back unchanged, not summed.

    Args:
        values: any shape; each rank fills in its own entries, and zeros elsewhere.
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
