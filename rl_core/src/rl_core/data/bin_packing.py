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
    bins = [[row] for row in order if 2 * lengths[row] > capacity]
    rest = order[len(bins) :]

    def move_longest(into: list[int], *, above: float = -1.0) -> bool:
        """Move the longest remaining row that fits and is longer than `above`; False if there is none."""
        room = capacity - sum(lengths[row] for row in into)
        chosen = next((row for row in rest if above < lengths[row] <= room), None)
        if chosen is not None:
            rest.remove(chosen)
            into.append(chosen)
        return chosen is not None

    for rows in bins:
        move_longest(rows, above=capacity / 3)
    for rows in reversed(bins):
        small = [row for row in rest if capacity / 6 < lengths[row] <= capacity / 3]
        if len(rows) == 1 and len(small) > 1 and sum(lengths[row] for row in (*rows, *small[-2:])) <= capacity:
            rest.remove(small[-1])
            rows.append(small[-1])
            move_longest(rows, above=capacity / 6)
    for rows in bins:
        while move_longest(rows):
            pass
    return bins + _first_fit(rest, lengths, capacity)


PACKERS: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}
"""Packing algorithms by name: row numbers by bin, from the tokens of each row and the capacity of a bin."""
