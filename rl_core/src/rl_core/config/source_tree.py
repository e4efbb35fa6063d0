"""Values that remember the file, line and column they were written at. Independent of models and YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]
"""The key of a value: keys of mappings and indices of lists, from the root."""


def dotted(path: KeyPath) -> str:
    """A key as errors print it and overrides take it: `policy.generation.stop_strings.0`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A source location.

    Attributes:
        source: A file as the user would name it, or an override with its number.
        line: Counted from 1; None for an override.
        column: Counted from 1; None for an override.
        file: The file's own path; None for an override.
        number: The number of the override, from 1; None for a file.
    """

    source: str
    line: int | None = None
    column: int | None = None
    file: str | None = None
    number: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value with its source location; containers contain `Node` again.

    Attributes:
        value: A scalar, a dict of `Node` by key, or a list of `Node`.
        location: The location of the value.
        key_location: The location of its key; that of the value in lists and at the root.
        text: A scalar as it was typed, without quotes; None for containers.
        replaces: Whether a mapping replaces the inherited one (`_override_: true`) instead of merging with it.
        is_default: Whether a mapping of an inheriting file replaces this one (`_default_: true`) instead of merging with it.
    """

    value: Any
    location: SourceLocation
    key_location: SourceLocation
    text: str | None = None
    replaces: bool = False
    is_default: bool = False

    def child(self, key: str | int) -> Node | None:
        """The value under a key or at an index of a list, or None."""
        child: Node | None = None
        if isinstance(self.value, dict):
            child = self.value.get(key)
        elif isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            child = self.value[key]
        return child

    def at(self, path: KeyPath) -> Node | None:
        """The value at a path, or None if nothing is written there."""
        node: Node | None = self
        for part in path:
            node = None if node is None else node.child(part)
        return node

    def nearest(self, path: KeyPath) -> Node:
        """The value at a path, or the innermost value on the way to it."""
        node = self
        for part in path:
            if (inner := node.child(part)) is None:
                return node
            node = inner
        return node

    def plain(self) -> Any:
        """The plain values: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def leaves(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """Every scalar and empty container with its path."""
        if isinstance(self.value, dict) and self.value:
            for key, item in self.value.items():
                yield from item.leaves((*path, key))
        elif isinstance(self.value, list) and self.value:
            for index, item in enumerate(self.value):
                yield from item.leaves((*path, index))
        else:
            yield path, self


def override_named(root: Node, path: KeyPath, message: str) -> SourceLocation | None:
    """The last override of a key that a message about `path` names: by its whole path, or by its name in that section."""
    named = re.findall(r"\w+(?:\.\w+)*", message)
    overridden = [(key, node.location) for key, node in root.leaves() if node.location.number is not None]
    hits = [at for key, at in overridden if dotted(key) in named or (key[:-1] in (path, path[:-1]) and str(key[-1]) in named)]
    return max(hits, key=lambda at: at.number or 0, default=None)


def node_from_plain(value: Any, *, location: SourceLocation) -> Node:
    """Plain values, all with the same source location."""
    if isinstance(value, Mapping):
        inner: Any = {key: node_from_plain(item, location=location) for key, item in value.items()}
        return Node(inner, location=location, key_location=location)
    if isinstance(value, list):
        return Node([node_from_plain(item, location=location) for item in value], location=location, key_location=location)
    return Node(value, location=location, key_location=location)
