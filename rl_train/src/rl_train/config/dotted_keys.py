"""Plain values of nested sections by dotted key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values by dotted key; an empty section counts as a value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, value
