"""Concatenates map-style collections."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rl_train.data.holdout import row_location


class ConcatDataset(Sequence[Any]):
    """Several map-style collections, concatenated.

    Args:
        parts: The collections.
    """

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self.parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        number, row = self.locate(index)
        return self.parts[number][row]

    def row_location(self, index: int) -> str:
        """Location of the row of a record."""
        number, row = self.locate(index)
        return row_location(self.parts[number], row)

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the collection, and the index in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)
