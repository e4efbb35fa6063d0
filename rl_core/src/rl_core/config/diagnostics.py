"""Values of a config with their source locations, and its problems: location, key, what was found, what is allowed, what to do.

Independent of YAML and of the sections; other modules report their problems here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.errors import ConfigError
from rl_core.plugins.component import nearest as nearest

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


_LONGEST_VALUE = 60
KEY_CUTOFF = 0.75
"""Least similarity of an unknown key and the one that is suggested; many settings have similar names."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        path: The key it is about; empty for the file as a whole.
        message: What is wrong, without location and key, and what to do.
        location: The location of the value; None if nothing was read, or until the key is looked up.
        is_missing: Whether the key is missing. The message then starts with "is required", and the key is its subject.
    """

    path: KeyPath
    message: str
    location: SourceLocation | None = None
    is_missing: bool = False

    def __str__(self) -> str:
        location = "" if self.location is None else str(self.location)
        return f"{location}: {self.text}" if location else self.text

    @property
    def text(self) -> str:
        """The problem without its location."""
        if not self.path:
            return self.message
        return f"{dotted(self.path)}{' ' if self.is_missing else ': '}{self.message}"


class InvalidConfigError(ConfigError):
    """The config is invalid; lists all problems.

    Attributes:
        problems: All problems, in file order.
        not_checked: The rules that could not be checked because of them, one sentence each.
    """

    def __init__(self, problems: Iterable[Problem], not_checked: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        self.not_checked = tuple(not_checked)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InvalidConfigError], tuple[tuple[Problem, ...], tuple[str, ...]]]:
        return type(self), (self.problems, self.not_checked)


@dataclass
class Problems:
    """Collects problems, so that all of them are reported at once.

    Attributes:
        found: The problems so far.
        poisoned: Keys with a value known to be invalid; follow-up errors about them are not reported.
        misspelled: Keys that were probably meant by unknown ones, so that their values are not known.
        not_checked: The rules that could not be checked because of the problems, one sentence each.
        is_partial: Whether a file could not be read, so that a missing key may be set there.
        redact: Removes values that problems must not show from a message.
    """

    found: list[Problem] = field(default_factory=list)
    poisoned: set[KeyPath] = field(default_factory=set)
    misspelled: set[KeyPath] = field(default_factory=set)
    not_checked: list[str] = field(default_factory=list)
    is_partial: bool = False
    redact: Callable[[str], str] = str

    def add(self, message: str, *, location: SourceLocation | None, path: KeyPath = (), is_missing: bool = False) -> None:
        """Adds a problem; see `Problem`."""
        self.include(Problem(path, message, location, is_missing))

    def include(self, problem: Problem) -> None:
        """Adds a problem unless it has been reported."""
        problem = replace(problem, message=self.redact(problem.message))
        if problem not in self.found:
            self.found.append(problem)

    def mark_invalid(self, message: str, *, location: SourceLocation | None, path: KeyPath) -> None:
        """Adds a problem, and marks its value as invalid so that it is not checked again."""
        self.add(message, location=location, path=path)
        self.poisoned.add(path)

    def is_invalid(self, path: KeyPath) -> bool:
        """Whether this value, or one that contains it, is already known to be invalid."""
        return any(path[:length] in self.poisoned for length in range(len(path) + 1))

    def raise_if_any(self) -> None:
        """Raises an error if there are problems.

        Raises:
            InvalidConfigError: There is at least one problem.
        """
        if self.found:
            raise InvalidConfigError(sorted(self.found, key=in_order_of_files), self.not_checked)


def show(value: Any) -> str:
    """A value as an error prints it: in YAML notation, long values truncated."""
    match value:
        case None:
            text = "null"
        case bool():
            text = "true" if value else "false"
        case dict():
            keys = ", ".join(str(key) for key in value)
            text = f"a mapping of {keys}" if value else "an empty mapping"
        case list():
            text = f"a list of {len(value)}" if value else "an empty list"
        case float() if not math.isfinite(value):
            text = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
        case _:
            text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def in_order_of_files(problem: Problem) -> tuple[bool, str, int, int]:
    """The key by which problems are sorted: by file, line and column, then those of overrides."""
    location = problem.location
    if location is None:
        return (False, "", 0, 0)
    if location.number is not None:
        return (True, "", location.number, 0)
    return (False, location.source, location.line or 0, location.column or 0)
