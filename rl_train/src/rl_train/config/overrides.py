"""Command-line overrides, `key=value` and `++key=value`, applied to the values of the config files. Independent of the schema.

`key=value` sets a key that exists in the file or the schema; `++key=value` may also add one to a section with free keys. The
loader checks the keys later, using `Override.known`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.config.diagnostics import InvalidConfigError, Problem, Problems, show
from rl_core.config.source_tree import KeyPath, Node, SourceLocation, dotted
from rl_train.config.slots import is_named_by_user
from rl_train.yaml_reader import read_yaml

_SHAPE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^=]*)=(?P<value>.*)", re.DOTALL)
_INDEX = re.compile(r"\[(\d{1,9})\]")
_INDICES = re.compile(r"(\[\d{1,9}\])+$")
_MAX_INDEX_DIGITS = 9
"""Most digits of a list index, as in `_INDEX`."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override, as applied to the values of the files.

    Attributes:
        path: The key that it sets; an index is an integer if it stands in a list, or in brackets in a list that does not exist.
        location: The override as a source location, with its number.
        adds: Whether it starts with `++`.
        known: Number of leading path components that existed before it was applied.
    """

    path: KeyPath
    location: SourceLocation
    adds: bool
    known: int


def apply_overrides(root: Node, overrides: Sequence[str], *, problems: Problems) -> tuple[Node, tuple[Override, ...]]:
    """The values of the files with the overrides applied in order.

    Args:
        root: The values of the files.
        overrides: `key=value`; the value is YAML (`1e-5`, `[a, b]`, `null`, `'007'`), the key dotted (`policy.precision`,
            `data.files.0` or `data.files[0]`).
        problems: Receives those that cannot be applied.
    """
    applied = []
    for number, text in enumerate(overrides, start=1):
        shortened = text if len(text) <= 80 else f"{text[:77]}..."
        location = SourceLocation(f"override #{number} `{shortened}`", number=number)
        try:
            path, value, adds = _parse(text, location)
            path = _with_indices(root, path)
            known = max(length for length in range(len(path) + 1) if root.at(path[:length]) is not None)
            root = _set(root, path, value, done=(), location=location)
            applied.append(Override(path=path, location=location, adds=adds, known=known))
        except InvalidConfigError as error:
            for problem in error.problems:
                problems.include(problem)
    return root, tuple(applied)


def _parse(text: str, location: SourceLocation) -> tuple[KeyPath, Node, bool]:
    """The key, the value and whether the override may add the key; raises InvalidConfigError, as `_set`."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        meant = ""
        if text.endswith((".yaml", ".yml")) or os.path.isfile(text):
            meant = " To layer several config files, give the first ones with --config, or use `defaults:` in the last."
        raise _invalid(f"Overrides have the form key=value without spaces, such as policy.precision=bfloat16.{meant}", location)
    if match["plus"] == "+":
        raise _invalid("The prefix `+` is not supported: use `++key=value` to add a key, or `key=value` to set one.", location)
    keys = [key for part in _components(match["key"].strip()) for key in part]
    if "" in keys:
        raise _invalid(
            "The key before `=` has an empty component: write it like policy.precision=bfloat16, without spaces.", location
        )
    if keys[0] == "defaults":
        raise _invalid("`defaults` is read before overrides are applied: set it in a file.", location)
    if not match["value"].strip():
        raise _invalid("There is no value after `=`: use null for no value, '' for an empty string.", location)
    problems = Problems()
    value = read_yaml(match["value"], location=location, problems=problems)
    problems.raise_if_any()
    if value is None:
        raise _invalid("There is no value after `=`: text that starts with `#` must be quoted.", location)
    return tuple(keys), value, bool(match["plus"])


def _invalid(message: str, location: SourceLocation, path: KeyPath = ()) -> InvalidConfigError:
    return InvalidConfigError([Problem(path, message, location)])


def _components(key: str) -> Iterator[KeyPath]:
    """The components between dots, each followed by its indices in brackets."""
    for part in key.split("."):
        indices = _INDICES.search(part)
        if indices is None:
            yield (part,)
        else:
            yield (part[: indices.start()], *map(int, _INDEX.findall(indices.group())))


def _with_indices(root: Node, path: KeyPath) -> KeyPath:
    """The path with list indices as integers; an index in brackets is a key if it stands in a mapping.

    A key of a mapping may contain dots, such as the import path of a logger: the longest one that exists is meant.
    """
    found: Node | None = root
    keys: list[str | int] = []
    remaining = list(path)
    while remaining:
        part = remaining.pop(0)
        if found is not None and isinstance(found.value, dict):
            names = [".".join(map(str, [part, *remaining[:more]])) for more in range(len(remaining) + 1)]
            more = max((more for more, name in enumerate(names) if name in found.value), default=0)
            part, remaining = names[more], remaining[more:]
        elif found is not None and isinstance(found.value, list):
            is_index = str(part).isdecimal() and len(str(part)) <= _MAX_INDEX_DIGITS
            part = int(part) if is_index else part
        keys.append(part)
        found = None if found is None else found.child(part)
    return tuple(keys)


def _set(node: Node, path: KeyPath, value: Node, *, done: KeyPath, location: SourceLocation) -> Node:
    if not path:
        return value
    part, rest = path[0], path[1:]
    here = (*done, part)
    inner = node.child(part)
    if isinstance(node.value, list) and inner is None:
        valid = f"valid indices are 0 to {len(node.value) - 1}"
        raise _invalid(f"{dotted(done)} is a list of {len(node.value)}: {valid}.", location, here)
    if not isinstance(node.value, dict | list):
        raise _invalid(f"{dotted(done)} is {show(node.value)} ({node.location}), which has no keys.", location, here)
    if value.value is None and isinstance(node.value, dict) and not rest and is_named_by_user(here):
        return replace(node, value={key: item for key, item in node.value.items() if key != part})
    # A missing or null key becomes a new section.
    child = Node({}, location=location, key_location=location) if inner is None or (inner.value is None and rest) else inner
    new = _set(child, rest, value, done=here, location=location)
    changed: Any = (
        {**node.value, str(part): new}
        if isinstance(node.value, dict)
        else [new if index == part else item for index, item in enumerate(node.value)]
    )
    return Node(changed, location=node.location, key_location=node.key_location)
