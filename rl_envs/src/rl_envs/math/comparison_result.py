"""The result of a comparison of two answers."""

from __future__ import annotations

from enum import IntEnum


class Comparison(IntEnum):
    """How an answer compares with the expected one. A list has the result of its worst element, the largest value."""

    EQUAL = 0
    UNEVALUATED = 1
    """It has unevaluated arithmetic that the expected answer does not have: `3 + 2` for 5."""
    UNREADABLE = 2
    """It is neither a formula that can be parsed nor the expected text."""
    DIFFERENT = 3


def equal_if(condition: bool) -> Comparison:
    """Equal or different."""
    return Comparison.EQUAL if condition else Comparison.DIFFERENT
