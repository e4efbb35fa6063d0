"""Command-line overrides, `key=value` and `++key=value`, applied to the values of the files. Independent of the sections.

`key=value` sets a key that the file or its model has; `++key=value` may add one to a section with free keys. This module does
not know the models' keys: `Override.known` lets the loader check them later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.config.diagnostics import Problems, show
from rl_core.config.source_tree import KeyPath, Node, SourceLocation, dotted
from rl_train.config.yaml_reader import read_yaml

_SHAPE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^=]*)=(?P<value>.*)", re.DOTALL)
_INDEX = re.compile(r"\[(\d{1,9})\]")
_MOST_DIGITS = 9
"""Of a position in a list, as in `_INDEX`."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override, as applied to the values of the files.

    Attributes:
        path: The key that it sets.
        place: The override as a source location, with its number.
        adds: Whether it is written with `++`.
        known: How many components of the path existed in the files before it.
    """

    path: KeyPath
    place: SourceLocation
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
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        place = SourceLocation(f"override #{number} `{shown}`", number=number)
        parsed = _parse(text, place=place, problems=problems)
        if parsed is None:
            continue
        path, value, adds = parsed
        path = _with_positions(root, path)
        known = max(length for length in range(len(path) + 1) if root.at(path[:length]) is not None)
        changed = _set(root, path, value, done=(), place=place, problems=problems)
        if changed is not None:
            root = changed
            applied.append(Override(path=path, place=place, adds=adds, known=known))
    return root, tuple(applied)


def _parse(text: str, *, place: SourceLocation, problems: Problems) -> tuple[KeyPath, Node, bool] | None:
    match = _SHAPE.fullmatch(text)
    if match is None:
        meant = ""
        if text.endswith((".yaml", ".yml")) or os.path.isfile(text):
            meant = " A second config file is inherited with `defaults:` in the first."
        problems.add(f"An override is written key=value, such as policy.precision=bfloat16.{meant}", place=place)
        return None
    if match["plus"] == "+":
        problems.add("Write `++` to add a key, and nothing to set one.", place=place)
        return None
    keys = _INDEX.sub(r".\1", match["key"].strip()).split(".")
    if not all(keys):
        problems.add("The key before `=` has an empty part: write it like policy.precision.", place=place)
        return None
    if keys[0] == "defaults":
        problems.add("`defaults` is read before overrides are: write it in a file.", place=place)
        return None
    if not match["value"].strip():
        problems.add("There is no value after `=`: write null for none, '' for empty text.", place=place)
        return None
    before = len(problems.found)
    value = read_yaml(match["value"], place=place, problems=problems)
    if value is None:
        if len(problems.found) == before:
            problems.add("There is no value after `=`: text that begins with `#` needs quotes.", place=place)
        return None
    return tuple(keys), value, bool(match["plus"])


def _with_positions(root: Node, path: KeyPath) -> KeyPath:
    """The path with numbers as indices of lists."""
    found: Node | None = root
    positions: list[str | int] = []
    for part in path:
        in_list = found is not None and isinstance(found.value, list)
        part = int(part) if in_list and str(part).isdecimal() and len(str(part)) <= _MOST_DIGITS else part
        positions.append(part)
        found = None if found is None else found.child(part)
    return tuple(positions)


def _set(node: Node, path: KeyPath, value: Node, *, done: KeyPath, place: SourceLocation, problems: Problems) -> Node | None:
    if not path:
        return value
    part, rest = path[0], path[1:]
    here = (*done, part)
    inner = node.child(part)
    # A key that is absent or null is where a section begins.
    below = Node({}, place=place, key_place=place) if inner is None or (inner.value is None and rest) else inner
    changed: Any
    if isinstance(node.value, dict):
        new = _set(below, rest, value, done=here, place=place, problems=problems)
        changed = None if new is None else {**node.value, str(part): new}
    elif isinstance(node.value, list):
        if inner is None:
            problems.add(
                f"{dotted(done)} is a list of {len(node.value)}: its positions are 0 to {len(node.value) - 1}.",
                place=place,
                path=here,
            )
            return None
        new = _set(inner, rest, value, done=here, place=place, problems=problems)
        changed = None if new is None else [new if i == part else item for i, item in enumerate(node.value)]
    else:
        problems.add(f"{dotted(done)} is {show(node.value)} ({node.place}), which holds no keys.", place=place, path=here)
        return None
    return None if changed is None else Node(changed, place=node.place, key_place=node.key_place)
