"""Rows of an import table: keys of another framework, their outcome and its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "???"
"""A value that must be set by a config that inherits from this one."""


@dataclass(frozen=True)
class Mapped:
    """The value is kept, under one or more new keys.

    Attributes:
        values: New values by dotted key.
        note: How the meaning changes; empty if it does not.
    """

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Redundant:
    """The key is not needed: this is the behavior anyway, or the feature is disabled in the imported config."""

    reason: str


@dataclass(frozen=True)
class Unsupported:
    """The setting is unsupported."""

    reason: str


Decision = Mapped | Redundant | Unsupported


class ForeignConfig:
    """The whole imported config as plain values, for conversions that need other keys.

    Args:
        values: The sections with interpolations resolved.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key; the default if it is absent, null or `???`."""
        value: Any = self.values
        for part in key.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == MISSING else value

    def number(self, key: str, default: int) -> int:
        """The integer at a dotted key, or the default."""
        value = self.get(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default


Case = tuple[Callable[[Any, ForeignConfig], bool], Decision]
"""A condition on the value and the whole imported config, and the outcome if it holds."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The conversion of the keys that match a pattern.

    Attributes:
        pattern: A dotted key; `*` matches one component, `**` at the end matches everything below.
        decide: Called with the value and the whole imported config.
        whole: Convert the section as one value; the outcome applies to every key in it.
        verbatim: The value is copied without inspection, so `???` stays `???`.
    """

    pattern: str
    decide: Callable[[Any, ForeignConfig], Decision]
    whole: bool = False
    verbatim: bool = False

    def covers(self, path: Sequence[str]) -> bool:
        """Whether the pattern matches this key."""
        return _covers(f"{self.pattern}.**" if self.whole else self.pattern, path)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A section that has no effect while it is disabled.

    Attributes:
        pattern: As in `Row`.
        is_on: Whether the section is enabled.
        off: Why it has no effect.
    """

    pattern: str
    is_on: Callable[[ForeignConfig], bool]
    off: str

    def covers(self, path: Sequence[str]) -> bool:
        """Whether the key is in the section."""
        return _covers(self.pattern, path)


@dataclass(frozen=True, kw_only=True)
class Defaulted:
    """A new key that corresponds to no imported key.

    Attributes:
        key: The dotted key.
        value: Its value.
        reason: Why it is needed.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """The import table of another framework.

    Attributes:
        framework: Its name.
        rows: The first row that matches a key decides.
        switches: Checked before the rows; keys of a disabled section are redundant.
        always: Rows that are checked first of all.
        defaults: Defaults of the framework that differ from those of rlcore, by algorithm section.
        additions: Keys that the new config needs in addition, given the imported config and the new values by dotted key.
        sections: Top-level sections of the framework, for the error message if a file has none of them.
        native_key: A key that every rlcore config has and the framework does not, to recognize rlcore configs.
    """

    framework: str
    always: Sequence[Row]
    switches: Sequence[Switch]
    rows: Sequence[Row]
    defaults: Mapping[str, Mapping[str, Any]]
    additions: Callable[[ForeignConfig, Mapping[str, Any]], Iterator[Defaulted]]
    sections: Sequence[str]
    native_key: str


def same(prefix: str, names: str) -> list[Row]:
    """Rows for keys with the same path and meaning; names are separated by spaces."""
    return [renamed(f"{prefix}.{name}", f"{prefix}.{name}") for name in names.split()]


def renamed(pattern: str, native: str, note: str = "") -> Row:
    """A row for a key with the same meaning under another path."""
    return Row(pattern=pattern, decide=lambda value, foreign: Mapped({native: value}, note), verbatim=True)


def converted(pattern: str, decide: Callable[[Any, ForeignConfig], Decision], *, whole: bool = False) -> Row:
    """A row for a key whose outcome depends on its value."""
    return Row(pattern=pattern, decide=decide, whole=whole)


def cases(pattern: str, *options: Case, otherwise: Decision) -> Row:
    """A row for a key with the outcome of the first case that applies."""
    return converted(pattern, lambda value, foreign: _first(options, value, foreign) or otherwise)


def kept(pattern: str, *exceptions: Case, to: str | None = None, whole: bool = False) -> Row:
    """A row for a key whose value is kept, under its own path or `to`, unless a case applies; the first one decides."""

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        return _first(exceptions, value, foreign) or Mapped({to or pattern: value})

    return converted(pattern, decide, whole=whole)


def one_of(*values: Any) -> Callable[[Any, ForeignConfig], bool]:
    """The condition that the value is one of these."""
    return lambda value, foreign: value in values


def other_than(*values: Any) -> Callable[[Any, ForeignConfig], bool]:
    """The condition that the value is none of these."""
    return lambda value, foreign: value not in values


def is_empty(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the value is null, false, zero or empty."""
    return not value


def is_null(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the value is null."""
    return value is None


def is_true(value: Any, foreign: ForeignConfig) -> bool:
    """Whether the value is true."""
    return value is True


def redundant(prefix: str, names: str, reason: str) -> list[Row]:
    """Rows for keys that are redundant whatever their value."""
    return [Row(pattern=_under(prefix, name), decide=lambda value, foreign: Redundant(reason)) for name in names.split()]


def unsupported(prefix: str, names: str, reason: str) -> list[Row]:
    """Rows for keys that are unsupported whatever their value."""
    return [Row(pattern=_under(prefix, name), decide=lambda value, foreign: Unsupported(reason)) for name in names.split()]


def redundant_if(prefix: str, names: str, allowed: Sequence[Any], *, since: str, reason: str) -> list[Row]:
    """Rows for keys that are redundant for some values and unsupported for all others.

    Args:
        prefix: The section.
        names: Its keys, separated by spaces.
        allowed: The redundant values, in addition to null, an empty section and an empty list.
        since: Why they are redundant.
        reason: Why other values are unsupported.
    """

    def decide(value: Any, foreign: ForeignConfig) -> Decision:
        is_empty = value is None or value in ({}, [])
        return Redundant(since) if is_empty or any(_equal(value, one) for one in allowed) else Unsupported(reason)

    return [converted(_under(prefix, name), decide) for name in names.split()]


def _first(options: Sequence[Case], value: Any, foreign: ForeignConfig) -> Decision | None:
    return next((decision for applies, decision in options if applies(value, foreign)), None)


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
    # In Python 1 == True; in a config they differ.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
