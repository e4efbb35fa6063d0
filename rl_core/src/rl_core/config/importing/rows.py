"""What a row of an import table is: a key of theirs, and what becomes of it here, with the reason; it knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEFT_OPEN = "???"
"""A value that a file leaves to whoever inherits from it."""


@dataclass(frozen=True)
class Becomes:
    """The value goes on, under one key of ours or several.

    Attributes:
        values: Ours by dotted key.
        note: What is not as it was; empty where nothing is.
    """

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Unneeded:
    """There is nothing to write: what theirs asks for happens anyway, or theirs has switched it off."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """What theirs asks for does not happen here."""

    reason: str


Decision = Becomes | Unneeded | Refused


class Theirs:
    """A whole config of theirs as plain values, for conversions that look beyond their own key.

    Args:
        values: The sections, interpolations resolved.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value under a dotted key; the default where it is not written, null or left open."""
        found: Any = self.values
        for part in key.split("."):
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None or found == LEFT_OPEN else found

    def number(self, key: str, default: int) -> int:
        """A whole number under a dotted key, or the default."""
        found = self.get(key, default)
        return found if isinstance(found, int) and not isinstance(found, bool) else default


@dataclass(frozen=True, kw_only=True)
class Row:
    """What becomes of the keys that a pattern covers.

    Attributes:
        pattern: A dotted key; `*` is any one part, and `**` at the end is whatever lies below.
        decide: Given the value and all of theirs.
        whole: Decide about the section as one value; what is decided is then said of every key in it.
        as_it_is: The value is passed on unseen, so that one left open stays open.
    """

    pattern: str
    decide: Callable[[Any, Theirs], Decision]
    whole: bool = False
    as_it_is: bool = False

    def covers(self, path: Sequence[str]) -> bool:
        """Whether the row is about this key."""
        return _covers(f"{self.pattern}.**" if self.whole else self.pattern, path)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A section that does nothing while theirs has switched it off.

    Attributes:
        pattern: As a row's.
        is_on: Whether it does something.
        off: Why it does nothing.
    """

    pattern: str
    is_on: Callable[[Theirs], bool]
    off: str

    def covers(self, path: Sequence[str]) -> bool:
        """Whether the key is in the section."""
        return _covers(self.pattern, path)


@dataclass(frozen=True, kw_only=True)
class Added:
    """A key of ours that no key of theirs says.

    Attributes:
        key: Dotted.
        value: What it holds.
        reason: Why it is needed.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """All that is known of another framework's config.

    Attributes:
        framework: Its name.
        rows: The first that covers a key decides about it.
        switches: Asked before the rows: a section that is off needs nothing.
        always: Rows that are asked before all else.
        defaults: What theirs holds where its file is silent and ours would hold something else, by algorithm section.
        additions: Keys that ours needs besides, given theirs and what was taken over so far by dotted key.
        sections: Names that its files begin with, for the error of a file that has none of them.
        only_ours: A key that every config of ours has and theirs never, by which one of ours is recognized.
    """

    framework: str
    always: Sequence[Row]
    switches: Sequence[Switch]
    rows: Sequence[Row]
    defaults: Mapping[str, Mapping[str, Any]]
    additions: Callable[[Theirs, Mapping[str, Any]], Iterator[Added]]
    sections: Sequence[str]
    only_ours: str


def same(prefix: str, names: str) -> list[Row]:
    """Keys that have the same path and meaning here; names separated by spaces."""
    return [to(f"{prefix}.{name}", f"{prefix}.{name}") for name in names.split()]


def to(pattern: str, ours: str, note: str = "") -> Row:
    """A key that means the same here under another path."""
    return Row(pattern=pattern, decide=lambda value, theirs: Becomes({ours: value}, note), as_it_is=True)


def by(pattern: str, decide: Callable[[Any, Theirs], Decision], *, whole: bool = False) -> Row:
    """A key whose value decides what becomes of it."""
    return Row(pattern=pattern, decide=decide, whole=whole)


def nothing(prefix: str, names: str, reason: str) -> list[Row]:
    """Keys that need nothing here, whatever they hold."""
    return [Row(pattern=_under(prefix, name), decide=lambda value, theirs: Unneeded(reason)) for name in names.split()]


def never(prefix: str, names: str, reason: str) -> list[Row]:
    """Keys that cannot be honoured, whatever they hold."""
    return [Row(pattern=_under(prefix, name), decide=lambda value, theirs: Refused(reason)) for name in names.split()]


def only(prefix: str, names: str, allowed: Sequence[Any], *, since: str, reason: str) -> list[Row]:
    """Keys with values that need nothing here; any other cannot be honoured.

    Args:
        prefix: The section.
        names: Its keys, separated by spaces.
        allowed: Those values; null, an empty section and an empty list are always among them.
        since: Why they need nothing.
        reason: Why the others cannot be honoured.
    """

    def decide(value: Any, theirs: Theirs) -> Decision:
        silent = value is None or value in ({}, [])
        return Unneeded(since) if silent or any(_equal(value, one) for one in allowed) else Refused(reason)

    return [by(_under(prefix, name), decide) for name in names.split()]


def _covers(pattern: str, path: Sequence[str]) -> bool:
    parts = pattern.split(".")
    below = parts[-1] == "**"
    parts = parts[:-1] if below else parts
    if len(path) < len(parts) or (len(path) > len(parts) and not below):
        return False
    return all(part in ("*", given) for part, given in zip(parts, path, strict=False))


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _equal(value: Any, other: Any) -> bool:
    # 1 is true to Python, and not to a config.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
