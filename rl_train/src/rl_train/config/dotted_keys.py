"""Plain values of nested sections by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.config.source_tree import KeyPath, dotted


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a section by dotted key, which begins with `key`; an empty section within it counts as a value."""
    return ((dotted(path), leaf) for path, leaf in leaves_by_path(value, (key,) if key else ()) if path)


def leaves_by_path(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The same by path; a value that is not a section has the empty path."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves_by_path(item, (*path, name))
    else:
        yield path, value
