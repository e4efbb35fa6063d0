"""Problems of a config, one line each: location, key, what was found, what is allowed, and a suggestion.

Independent of YAML and of the sections; other modules report their findings here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.config.source_tree import KeyPath, SourceLocation, dotted
from rl_core.errors import ConfigError
from rl_core.plugins.component import nearest as nearest

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
