"""Formats values of the data for errors."""

from __future__ import annotations

from typing import Any

_LONGEST = 120


def format_value(value: Any) -> str:
    """The value as text, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
