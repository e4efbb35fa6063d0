"""How errors show a value of the data; knows nothing else."""

from __future__ import annotations

from typing import Any

_LONGEST = 120


def format_value(value: Any) -> str:
    """A value in an error: whole, unless it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
