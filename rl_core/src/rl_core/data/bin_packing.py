"""Assigns rows to bins of limited capacity, by their lengths."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from rl_core.errors import DataError


class SequencePacker(ABC):
    """Packs rows into bins. Deterministic: ranks that plan independently agree.

    Args:
        bin_capacity: Maximum number of tokens in a bin.
        min_bin_count: Minimum number of bins, reached by splitting full ones.
        bin_count_multiple: Make the number of bins a multiple of this, by splitting full ones.
    """

    def __init__(self, bin_capacity: int, *, min_bin_count: int | None = None, bin_count_multiple: int | None = None) -> None:
        for name, value in (
            ("bin_capacity", bin_capacity),
            ("min_bin_count", min_bin_count),
            ("bin_count_multiple", bin_count_multiple),
        ):
            if value is not None and value < 1:
                raise DataError(f"{name} is {value}: it must be at least 1")
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count or 1
        self.bin_count_multiple = bin_count_multiple or 1

    @abstractmethod
    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        """Bins of row numbers; every length fits a bin."""

    def pack(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row numbers by bin, from the tokens of each row: every row once, no empty bin, none over capacity.

        Raises:
            DataError: A row is longer than a bin, or there are fewer rows than required bins.
        """
        return self.split_to_count(self.fill(lengths), lengths) if lengths else []

    def fill(self, lengths: Sequence[int]) -> list[list[int]]:
        """Row numbers by bin, in as few bins as the algorithm needs.

        Raises:
            DataError: A row is longer than a bin.
        """
        for row, length in enumerate(lengths):
            if not 0 <= length <= self.bin_capacity:
                raise DataError(
                    f"row {row} has {length} tokens, but a bin holds at most {self.bin_capacity}: "
                    "raise max_tokens_per_microbatch or shorten the row"
                )
        return self._pack(lengths)

    def bin_count(self, bins: Sequence[list[int]]) -> int:
        """The number of bins that `split_to_count` makes of `bins`."""
        return -(-max(len(bins), self.min_bin_count) // self.bin_count_multiple) * self.bin_count_multiple

    def split_to_count(self, bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Split the fullest bins until their number is allowed.

        Raises:
            DataError: There are fewer rows than required bins.
        """
        wanted = self.bin_count(bins)
        if wanted > len(lengths):
            raise DataError(
                f"{len(lengths)} rows cannot fill {wanted} bins (at least {self.min_bin_count}, a multiple of "
                f"{self.bin_count_multiple}): use more rows, a larger capacity, or fewer shards"
            )
        while len(bins) < wanted:
            fullest = max(
                (number for number, rows in enumerate(bins) if len(rows) > 1),
                key=lambda number: sum(lengths[row] for row in bins[number]),
            )
            bins[fullest : fullest + 1] = _halves(bins[fullest], lengths)
        return bins


def _halves(rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Two bins of about equal weight: longest row first, each into the lighter bin."""
    sides: list[list[int]] = [[], []]
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # An empty bin counts as lighter even if all rows have no tokens, so that neither stays empty.
        weights = [(sum(lengths[other] for other in side), len(side)) for side in sides]
        sides[weights.index(min(weights))].append(row)
    return sides


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for number, left in enumerate(room):
            if lengths[row] <= left:
                bins[number].append(row)
                room[number] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(capacity - lengths[row])
    return bins


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: -lengths[row])


class ConcatenativePacker(SequencePacker):
    """Rows in order; a new bin if the next row does not fit. Keeps the order but wastes the most space."""

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = [[]]
        left = self.bin_capacity
        for row, length in enumerate(lengths):
            if length > left:
                bins.append([])
                left = self.bin_capacity
            bins[-1].append(row)
            left -= length
        return bins


class FirstFitDecreasingPacker(SequencePacker):
    """Longest row first, into the first bin that fits: at most 11/9 of the fewest bins, plus 6/9 (Dósa 2007)."""

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        return _first_fit(_longest_first(range(len(lengths)), lengths), lengths, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """Rows in a shuffled order of fixed seed, into the first bin that fits: bins of mixed lengths."""

    seed = 0

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        order = list(range(len(lengths)))
        random.Random(self.seed).shuffle(order)
        return _first_fit(order, lengths, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """MFFD of Johnson and Garey (1985): at most 71/60 of the fewest bins, plus 1.

    Each row longer than half a bin opens one; each such bin then takes a row longer than a third, or a pair longer than a
    sixth. The remaining rows fill the gaps, longest first, and the rest is packed first-fit decreasing.
    """

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        order = _longest_first(range(len(lengths)), lengths)
        large = [row for row in order if 2 * lengths[row] > self.bin_capacity]
        filling = _Filling(lengths, self.bin_capacity, large, order[len(large) :])
        filling.add_mediums()
        filling.add_small_pairs()
        filling.fill_gaps()
        return filling.bins + _first_fit(filling.rest, lengths, self.bin_capacity)


class _Filling:
    """Bins that each contain one large row, longest first, and the rows (longest first) still to be assigned."""

    def __init__(self, lengths: Sequence[int], capacity: int, large: list[int], rest: list[int]) -> None:
        self.lengths, self.capacity, self.rest = lengths, capacity, rest
        self.bins = [[row] for row in large]
        self.room = [capacity - lengths[row] for row in large]

    def add_mediums(self) -> None:
        for number in range(len(self.bins)):
            self._put(number, self._largest(self.room[number], lambda length: 3 * length > self.capacity))

    def add_small_pairs(self) -> None:
        def is_small(length: int) -> bool:
            return self.capacity < 6 * length and 3 * length <= self.capacity

        for number in reversed(range(len(self.bins))):
            small = [row for row in self.rest if is_small(self.lengths[row])]
            if len(self.bins[number]) > 1 or len(small) < 2:
                continue
            if self.lengths[small[-1]] + self.lengths[small[-2]] <= self.room[number]:
                self._put(number, small[-1])
                self._put(number, self._largest(self.room[number], is_small))

    def fill_gaps(self) -> None:
        for number in range(len(self.bins)):
            while self._put(number, self._largest(self.room[number], lambda _: True)):
                pass

    def _largest(self, limit: int, admits: Callable[[int], bool]) -> int | None:
        fitting = (row for row in self.rest if self.lengths[row] <= limit and admits(self.lengths[row]))
        return next(fitting, None)

    def _put(self, number: int, row: int | None) -> bool:
        if row is None:
            return False
        self.rest.remove(row)
        self.bins[number].append(row)
        self.room[number] -= self.lengths[row]
        return True


PACKERS: dict[str, type[SequencePacker]] = {
    "concatenative": ConcatenativePacker,
    "first_fit_decreasing": FirstFitDecreasingPacker,
    "first_fit_shuffle": FirstFitShufflePacker,
    "modified_first_fit_decreasing": ModifiedFirstFitDecreasingPacker,
}
"""Packing algorithms by name."""


def get_packer(
    algorithm: str, bin_capacity: int, *, min_bin_count: int | None = None, bin_count_multiple: int | None = None
) -> SequencePacker:
    """The packer with a name in `PACKERS`, in any case; other arguments as `SequencePacker`.

    Raises:
        DataError: Unknown algorithm.
    """
    packer = PACKERS.get(str(algorithm).lower())
    if packer is None:
        raise DataError(f"Unknown packing algorithm {algorithm!r}: choose one of {sorted(PACKERS)}.")
    return packer(bin_capacity, min_bin_count=min_bin_count, bin_count_multiple=bin_count_multiple)
