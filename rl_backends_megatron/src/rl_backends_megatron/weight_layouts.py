"""How tensors of a Hugging Face checkpoint are combined into one Megatron tensor, sharded over ranks, and converted back.

A layout defines what a rank reads of the source tensors (`load`), how the ranks' shards are joined (`join`), and how the result
is split into source tensors (`split`, also used for their shapes). A new model needs a new layout only if it combines tensors
in a new way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Source(Protocol):
    """Reads tensors completely or partially."""

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor with this name."""

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries from `start` to `stop` along `dim`; fewer if the tensor ends before."""

    def size(self, name: str, dim: int) -> int:
        """The tensor's length along `dim`."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Model sizes for layouts.

    Attributes:
        num_heads: number of query heads.
        num_groups: number of key and value heads.
        head_dim: size of one head.
        vocab_size: V, without padding.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int


class WeightLayout(ABC):
    """A weight layout; see the module docstring.

    Attributes:
        dim: along which the Megatron tensor is sharded; None if it is replicated.
    """

    dim: int | None = None

    @abstractmethod
    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        """This rank's shard of the Megatron tensor, of `shape`; reads only what it needs."""

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full Megatron tensor."""
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """The source tensors, in the order of their names."""
        return [whole]


class Replicated(WeightLayout):
    """One tensor, replicated on every rank."""

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        return source.whole(names[0])


class Sharded(WeightLayout):
    """One tensor, split into equal shards along one dimension."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        assert self.dim is not None
        length = shape[self.dim]
        return source.read_slice(names[0], self.dim, rank * length, (rank + 1) * length)


class Vocabulary(WeightLayout):
    """[V, H] with sharded rows, padded with zero rows so that all ranks have equally many."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        start = min(rank * shape[0], sizes.vocab_size)
        found = source.read_slice(names[0], 0, start, min(start + shape[0], sizes.vocab_size))
        return torch.cat([found, found.new_zeros(shape[0] - len(found), *found.shape[1:])])

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return [whole[: sizes.vocab_size]]


class QueryKeyValue(WeightLayout):
    """Queries, keys and values (weights or biases) in one, sharded by rows: per key head its queries, the key, the value."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        if sizes.num_groups % ranks == 0:
            shards = []
            for name in names:
                rows = source.size(name, 0) // ranks
                shards.append(source.read_slice(name, 0, rank * rows, (rank + 1) * rows))
            return _by_group(shards, sizes.num_groups // ranks)
        # Fewer key heads than ranks: groups are split.
        whole = _by_group([source.whole(name) for name in names], sizes.num_groups)
        return whole[rank * shape[0] : (rank + 1) * shape[0]]

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        queries = sizes.num_heads // sizes.num_groups
        grouped = whole.reshape(sizes.num_groups, (queries + 2) * sizes.head_dim, *whole.shape[1:])
        tensors = grouped.split([queries * sizes.head_dim, sizes.head_dim, sizes.head_dim], 1)
        return [tensor.reshape(-1, *whole.shape[1:]) for tensor in tensors]


class GateAndUp(WeightLayout):
    """The two input matrices of a gated MLP, stacked on each rank: [gate_r; up_r]."""

    dim = 0

    def load(
        self, source: Source, names: Sequence[str], rank: int, ranks: int, shape: torch.Size, sizes: Sizes
    ) -> torch.Tensor:
        rows = shape[0] // 2
        return torch.cat([source.read_slice(name, 0, rank * rows, (rank + 1) * rows) for name in names])

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])

    def split(self, whole: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return list(whole.chunk(2, 0))


def _by_group(tensors: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    rest = tensors[0].shape[1:]
    return torch.cat([tensor.reshape(groups, -1, *rest) for tensor in tensors], 1).reshape(-1, *rest)
