"""The order in which the rows of several datasets are interleaved, by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rl_core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several datasets as one; rows are numbered member by member in the order of `sizes`.

    An epoch has as many rows as all members together, evenly interleaved: the first n of its N rows have n C / N rows of a
    member with C rows in the epoch, up to an error of (1 + M C / N) / 2 rows, with M members. C is N times the member's
    share of the weights, rounded. A member uses all of its rows before it repeats one, in a new order each time, and
    continues in the next epoch where it stopped.

    Attributes:
        sizes: Number of rows of each member.
        weights: Relative weight of each member.

    Raises:
        DataError: A member is empty, or its weight gives it no row in an epoch.
    """

    sizes: Mapping[str, int]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, count in self.counts.items():
            if not self.sizes[name]:
                raise DataError(f"data.mix.{name} has no rows: add rows, or remove it from the mixture")
            if not count:
                raise DataError(
                    f"data.mix.{name} has the weight {self.weights[name]} of {sum(self.weights.values())}: it would "
                    f"get none of the {len(self)} rows of an epoch. Raise its weight, or remove it"
                )

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return sum(self.sizes.values())

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of rows of each member in an epoch, by the largest remainder method."""
        total = sum(self.weights[name] for name in self.sizes)
        exact = {name: len(self) * self.weights[name] / total for name in self.sizes}
        counts = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
        for name in by_remainder[: len(self) - sum(counts.values())]:
            counts[name] += 1
        return counts

    @cached_property
    def pattern(self) -> torch.Tensor:
        """[N] int64: the number of the member at each position of an epoch.

        The k-th row of a member is due at (k + 1/2) / C of the epoch, and rows are sorted by this time. At time t, each member
        has had t C rows, rounded, which gives the bound of the class.
        """
        names = list(self.sizes)
        members = torch.cat([torch.full((self.counts[name],), number) for number, name in enumerate(names)])
        due = torch.cat([(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in self.counts.values()])
        return members[torch.argsort(due, stable=True)]

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """The row numbers of an epoch, [N]; the same on every machine and in every process.

        Args:
            seed: Each member's order depends on this seed and the member's name.
            epoch: Number of the epoch, from 0.
            shuffle: Whether the rows of a member are shuffled in each pass.
        """
        order = torch.empty(len(self), dtype=torch.int64)
        first = 0
        for number, (name, size) in enumerate(self.sizes.items()):
            count = self.counts[name]
            # The seed of a member does not depend on its position among the members.
            own = seed + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
            passes = _passes(size, epoch * count, (epoch + 1) * count, seed=own, shuffle=shuffle)
            order[self.pattern == number] = torch.cat([*passes]) + first
            first += size
        return order.tolist()

    def state(self) -> dict[str, Any]:
        """The properties that must be unchanged to resume an order, as JSON."""
        return {name: [self.sizes[name], self.counts[name]] for name in self.sizes}


def row_order(rows: int, *, seed: int, epoch: int) -> torch.Tensor:
    """[rows] int64: the permutation of the rows in that epoch; the same on every machine and in every process."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator)


def _passes(size: int, start: int, end: int, *, seed: int, shuffle: bool) -> Iterator[torch.Tensor]:
    """Rows `start` to `end` of the repeated passes over a member, one tensor per pass."""
    for number in range(start // size, -(-end // size)):
        rows = row_order(size, seed=seed, epoch=number) if shuffle else torch.arange(size)
        yield rows[max(0, start - number * size) : end - number * size]
