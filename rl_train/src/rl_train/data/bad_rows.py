"""Bad rows of a dataset: their locations, and the reasons why they cannot be used."""

from __future__ import annotations

import itertools
import string
import traceback
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rl_core.errors import DataError

_MOST_SPANS = 200
"""Most locations of a cause that are listed; consecutive rows are one."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used; rows with the same `cause` failed the same check."""

    location: str
    reason: str
    cause: Hashable

    @classmethod
    def of(cls, location: str, error: DataError) -> BadRow:
        """The row at a location, for which an error was raised and caught."""
        frames = traceback.walk_tb(error.__traceback__)
        return cls(
            location=location,
            reason=str(error),
            cause=tuple((frame.f_code.co_filename, line) for frame, line in frames),
        )

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class BadRowError(DataError):
    """A row cannot be used."""

    def __init__(self, row: BadRow) -> None:
        super().__init__(str(row))
        self.row = row


class BadRowsError(DataError):
    """Some or all rows cannot be used.

    Args:
        rows: The bad rows; at least one.
        total: Number of rows that were read.
        rows_of: Names these rows after "9 of", such as "60 rows of pairs.jsonl".
        remedy: How to continue without bad rows.
        key: The config key at fault.
    """

    def __init__(self, rows: Sequence[BadRow], *, total: int, rows_of: str, remedy: str, key: str | None = None) -> None:
        lines, text = bad_row_lines(rows), str(rows[0]).rstrip(".")
        if len(rows) == total > 1 and len(lines) == 1:
            text += f". It is the same in all {total} rows"
        elif len(rows) > 1:
            text = f"{len(rows)} of {rows_of} cannot be used:" + "".join(f"\n  {line}" for line in lines)
        super().__init__(text if len(rows) == total else f"{text}{'. ' if len(rows) == 1 else chr(10)}{remedy}", key=key)
        self.rows, self.total, self.rows_of = rows, total, rows_of


def bad_row_lines(rows: Sequence[BadRow]) -> list[str]:
    """For each cause, the most frequent first: the locations of all its rows, and the reason of the first."""
    by_cause: dict[Hashable, list[BadRow]] = {}
    for row in rows:
        by_cause.setdefault(row.cause, []).append(row)
    groups = sorted(by_cause.values(), key=len, reverse=True)
    return [f"{_locations(group)}: {group[0].reason}" for group in groups]


def _locations(rows: Sequence[BadRow]) -> str:
    """`rows.jsonl:3, 7-9`, or of several files one after the other. A location of a user's dataset may have no number."""
    by_prefix: dict[str, list[int]] = {}
    for row in rows:
        prefix = row.location.rstrip(string.digits)
        numbers = by_prefix.setdefault(prefix, [])
        if number := row.location.removeprefix(prefix):
            numbers.append(int(number))
    return "; ".join(f"{prefix}{_spans(numbers)}" for prefix, numbers in by_prefix.items())


def _spans(numbers: Sequence[int]) -> str:
    spans = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), lambda at: at[1] - at[0]):
        first, *others = (number for _, number in run)
        spans.append(f"{first}-{others[-1]}" if others else str(first))
    more = f" and {len(spans) - _MOST_SPANS} more" if len(spans) > _MOST_SPANS else ""
    return ", ".join(spans[:_MOST_SPANS]) + more
