"""Assigns rows to bins of limited capacity, by their lengths. Deterministic: ranks that plan independently agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rl_core.errors import DataError


def pack(lengths: Sequence[int], capacity: int, *, algorithm: str) -> list[list[int]]:
    """Row numbers by bin: every row once, no empty bin, none over capacity.

    Args:
        lengths: Tokens of each row.
        capacity: Maximum number of tokens in a bin.
        algorithm: A name in `PACKERS`, in any case.

    Raises:
        DataError: Unknown algorithm, or a row is longer than a bin.
    """
    packer = PACKERS.get(str(algorithm).lower())
    if packer is None:
        raise DataError(f"Unknown packing algorithm {algorithm!r}: choose one of {sorted(PACKERS)}.")
    for row, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise DataError(
                f"row {row} has {length} tokens, but a bin holds at most {capacity}: "
                "raise max_tokens_per_microbatch or shorten the row"
            )
    return packer(lengths, capacity) if lengths else []


def split_to_count(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split the fullest bins until there are `count`, which is at most the number of rows."""
    while len(bins) < count:
        weights = [sum(lengths[row] for row in rows) if len(rows) > 1 else -1 for rows in bins]
        fullest = weights.index(max(weights))
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


def _concatenative(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in order; a new bin if the next row does not fit. Keeps the order but wastes the most space."""
    bins: list[list[int]] = [[]]
    left = capacity
    for row, length in enumerate(lengths):
        if length > left:
            bins.append([])
            left = capacity
        bins[-1].append(row)
        left -= length
    return bins


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest row first, into the first bin that fits: at most 11/9 of the fewest bins, plus 6/9 (Dósa 2007)."""
    return _first_fit(sorted(range(len(lengths)), key=lambda row: -lengths[row]), lengths, capacity)


def _first_fit_shuffle(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in a shuffled order of fixed seed, into the first bin that fits: bins of mixed lengths."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    return _first_fit(order, lengths, capacity)


def _modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """MFFD of Johnson and Garey (1985): at most 71/60 of the fewest bins, plus 1.

    Each row longer than half a bin opens one; each such bin then takes a row longer than a third, or a pair longer than a
    sixth. The remaining rows fill the gaps, longest first, and the rest is packed first-fit decreasing.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    large = [row for row in order if 2 * lengths[row] > capacity]
    filling = _Filling(lengths, capacity, large, order[len(large) :])
    filling.add_mediums()
    filling.add_small_pairs()
    filling.fill_gaps()
    return filling.bins + _first_fit(filling.rest, lengths, capacity)


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
        return next((row for row in self.rest if self.lengths[row] <= limit and admits(self.lengths[row])), None)

    def _put(self, number: int, row: int | None) -> bool:
        if row is None:
            return False
        self.rest.remove(row)
        self.bins[number].append(row)
        self.room[number] -= self.lengths[row]
        return True


PACKERS: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}
"""Packing algorithms by name: row numbers by bin, from the tokens of each row and the capacity of a bin."""
