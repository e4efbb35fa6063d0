"""The order in which the rows of several datasets are seen together, by weight; knows sizes and numbers, no row."""

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
    """Several datasets as one, whose rows are numbered member after member in the order of `sizes`.

    An epoch has as many rows as all members have together, and they are interleaved evenly: among any first n rows of an epoch
    of N, a member with C of the N has n C / N, give or take (1 + M C / N) / 2 rows, with M members. C is N times the member's
    share of the weights, rounded. A member goes through all of its rows before it repeats one, in a new order each time, and
    goes on in the next epoch where it stopped in this one.

    Attributes:
        sizes: Rows of each member.
        weights: Of each member, relative to each other.

    Raises:
        DataError: A member is empty, or its weight gives it no row in a whole epoch.
    """

    sizes: Mapping[str, int]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, count in self.counts.items():
            if not self.sizes[name]:
                raise DataError(f"{name!r} of the mixture has no row")
            if not count:
                raise DataError(
                    f"{name!r} of the mixture has the weight {self.weights[name]} of {sum(self.weights.values())}: of the "
                    f"{len(self)} rows of an epoch none would be its. Give it more weight, or leave it out"
                )

    def __len__(self) -> int:
        """Rows of an epoch."""
        return sum(self.sizes.values())

    @cached_property
    def counts(self) -> dict[str, int]:
        """Rows of each member in an epoch: its exact share rounded down, what is left to the largest remainders."""
        total = sum(self.weights[name] for name in self.sizes)
        exact = {name: len(self) * self.weights[name] / total for name in self.sizes}
        counts = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
        for name in by_remainder[: len(self) - sum(counts.values())]:
            counts[name] += 1
        return counts

    @cached_property
    def pattern(self) -> torch.Tensor:
        """[N] int64: whose turn it is at each place of an epoch, by the member's number.

        A member's k-th row is due at (k + 1/2) / C of the epoch, and rows are seen in the order in which they are due. At a
        time t each member has had t C rows, rounded, which gives the bound of the class.
        """
        names = list(self.sizes)
        whose = torch.cat([torch.full((self.counts[name],), number) for number, name in enumerate(names)])
        due = torch.cat([(torch.arange(count, dtype=torch.float64) + 0.5) / count for count in self.counts.values()])
        return whose[torch.argsort(due, stable=True)]

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """The row numbers of an epoch, [N]; the same on every machine and in every process.

        Args:
            seed: Of the members' orders; each has its own, from the seed and its name.
            epoch: Which one.
            shuffle: Whether a member's rows are seen in a new order each time, or as they stand.
        """
        order = torch.empty(len(self), dtype=torch.int64)
        first = 0
        for number, (name, size) in enumerate(self.sizes.items()):
            count = self.counts[name]
            drawn = _drawn(size, epoch * count, count, seed=_seed_of(name, seed), shuffle=shuffle)
            order[self.pattern == number] = drawn + first
            first += size
        return order.tolist()

    def state(self) -> dict[str, Any]:
        """What must be the same for an order to go on: JSON."""
        return {name: [self.sizes[name], self.counts[name]] for name in self.sizes}


def row_order(rows: int, *, seed: int, epoch: int) -> torch.Tensor:
    """[rows] int64: the permutation of the rows in that epoch; the same on every machine and in every process."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator)


def _drawn(size: int, start: int, count: int, *, seed: int, shuffle: bool) -> torch.Tensor:
    """Rows `start` to `start + count` of a member that is gone through again and again."""
    return torch.cat([*_passes(size, start, start + count, seed=seed, shuffle=shuffle)])


def _passes(size: int, start: int, end: int, *, seed: int, shuffle: bool) -> Iterator[torch.Tensor]:
    for number in range(start // size, -(-end // size)):
        rows = row_order(size, seed=seed, epoch=number) if shuffle else torch.arange(size)
        yield rows[max(0, start - number * size) : end - number * size]


def _seed_of(name: str, seed: int) -> int:
    """A seed of the member's own, which does not depend on where it stands among the others."""
    return seed + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
