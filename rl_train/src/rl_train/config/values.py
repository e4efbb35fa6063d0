"""The values of a config between its files and its models: overrides, short forms, paths, and where each value came from.

An override `key=value` sets a key that exists in the file or the schema; `++key=value` may also add one to a section with free
keys. The loader checks the keys later, using `Override.known`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.config.diagnostics import InvalidConfigError, KeyPath, Node, Problem, Problems, SourceLocation, dotted, show
from rl_core.config.section import PathRule
from rl_train.config.slots import ConfigLayout, is_named_by_user
from rl_train.files import folders, leads_into_folder, locate, looks_like_path
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


_DATA_PATHS = {"train_data_path": "train", "val_data_path": "validation"}


def expand_data_paths(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Expands `train_data_path` and `val_data_path` of a section `data` in place; returns each short key and its split.

    Other keys of the split are kept. If the split has a path or another dataset, the short key is unchanged: the model of
    `data` rejects both forms.
    """
    expanded = [
        (short, split) for short, split in _DATA_PATHS.items() if data.get(short) is not None and _has_no_path(data, split)
    ]
    for short, split in expanded:
        data[split] = {**(data.get(split) or {}), "dataset_name": "jsonl", "path": data.pop(short)}
    return expanded


def with_validation_of_overrides(root: Node, overrides: Sequence[Override]) -> Node:
    """The config without the validation data of its files, if overrides define other validation data.

    Rows of `data.val_data_path` have the fields of the rows that they replace, which for `data.split` are training rows.
    """
    keys = {override.path[:2] for override in overrides}
    given = keys & {("data", "validation"), ("data", "val_data_path")}
    data = root.at(("data",))
    if data is None or all((node := root.at(path)) is None or node.value is None for path in given):
        return root
    values = dict(data.value)
    split = None if ("data", "split") in keys else values.pop("split", None)
    if given == {("data", "val_data_path")}:
        replaced = values.pop("validation", None)
        if split is not None and split.value is not None and (replaced is None or replaced.value is None):
            replaced = values.get("train")
        name = None if replaced is None else replaced.child("dataset_name")
        if replaced is not None and name is not None and name.value == "jsonl":
            fields = {key: node for key, node in replaced.value.items() if key != "path"}
            values["validation"] = replace(replaced, value=fields)
    return replace(root, value={**root.value, "data": replace(data, value=values)})


def _has_no_path(data: dict[str, Any], split: str) -> bool:
    given = {} if data.get(split) is None else data[split]
    return isinstance(given, dict) and given.get("path") is None and given.get("dataset_name") in (None, "jsonl")


def expand_aliases(values: dict[str, Any], *, written: Node, interpolations: dict[KeyPath, str]) -> Node:
    """Expand the short forms of a config; each value keeps the location where the user wrote it.

    Args:
        values: The plain values; changed in place.
        written: The same values with their source locations; returned with the short forms expanded.
        interpolations: The text of each interpolation, by its path; changed in place.
    """
    data, section = values.get("data"), written.child("data")
    for short, split in expand_data_paths(data) if isinstance(data, dict) else ():
        if section is not None and isinstance(section.value, dict):
            keys = dict(section.value)
            path, given = keys.pop(short), keys.get(split)
            others = given.value if given is not None and isinstance(given.value, dict) else {}
            keys[split] = Node({**others, "path": path}, location=path.key_location, key_location=path.key_location)
            section = replace(section, value=keys)
            written = replace(written, value={**written.value, "data": section})
        if ("data", short) in interpolations:
            interpolations["data", split, "path"] = interpolations.pop(("data", short))
    return written


_MODELS = ("model_name", "name", "tokenizer_name")
_ON_THE_HUB = {"path": ", or the name of a dataset on the hub"} | dict.fromkeys(_MODELS, ", or the name of a model on the hub")
"""What else a key accepts besides a path."""


def locate_paths(values: dict[str, Any], layout: ConfigLayout, *, written: Node, problems: Problems) -> None:
    """Makes every marked path absolute, in place; a name that is not a file is unchanged.

    Args:
        values: The plain values.
        layout: Determines which keys may contain paths.
        written: The same values with their source locations: paths are relative to the file that contains them.
        problems: Receives paths that do not exist.
    """
    for field in layout.fields():
        rule = next((item for item in field.info.metadata if isinstance(item, PathRule)), None)
        if rule is None:
            continue
        *parents, key = field.path
        section = _section(values, tuple(parents))
        text = section.get(str(key))
        if not isinstance(text, str) or problems.is_invalid(field.path):
            continue
        location = written.nearest(field.path).location
        found = locate(text, location=location)
        if found is not None:
            section[str(key)] = found
        elif rule.must_exist or looks_like_path(text) or (key in _MODELS and leads_into_folder(text, location=location)):
            searched = "" if os.path.isabs(os.path.expanduser(text)) else f" in {' or in '.join(folders(location))}"
            other = "" if rule.must_exist else _ON_THE_HUB.get(str(key), "")
            message = f"{show(text)} does not exist{searched}. Give an existing path{other}."
            problems.mark_invalid(message, location=location, path=field.path)


def _section(values: Any, path: KeyPath) -> dict[str, Any]:
    """The section itself, to be changed; an empty one if there is none."""
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


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


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of a value.

    Attributes:
        location: The file and line, or the override; None for a default.
        interpolation: The `${...}` at `location` that produced it.
        default_of: The model or component that defines the default; None if the config sets the value.
    """

    location: SourceLocation | None = None
    interpolation: str | None = None
    default_of: str | None = None

    def __str__(self) -> str:
        if self.location is None:
            return f"default of {self.default_of}"
        return str(self.location) if self.interpolation is None else f"{self.location}, through {self.interpolation}"


def trace(
    resolved: Mapping[str, Any], *, written: Node, interpolations: Mapping[KeyPath, str], layout: ConfigLayout
) -> dict[str, Origin]:
    """The origin of every leaf of a resolved config, by its dotted key.

    Args:
        resolved: The whole config with defaults.
        written: The values of files and overrides.
        interpolations: The text of each interpolation, by its path.
        layout: The models.
    """
    return {
        dotted(path): _origin(path, written=written, interpolations=interpolations, layout=layout)
        for path, _ in leaves_by_path(resolved)
    }


def _origin(path: KeyPath, *, written: Node, interpolations: Mapping[KeyPath, str], layout: ConfigLayout) -> Origin:
    for length in range(len(path), 0, -1):
        if path[:length] in interpolations:
            return Origin(location=written.nearest(path).location, interpolation=interpolations[path[:length]])
    if written.at(path) is not None:
        return Origin(location=written.nearest(path).location)
    section = layout.sections.get(path[:-1])
    if section is not None and path[-1] in section.implied:
        loss_of = layout.algorithm if path[0] == "loss_fn" else None
        return Origin(default_of=f"{dotted(path[:-1])}" if loss_of is None else f"the algorithm {loss_of}")
    field = layout.find(path)
    return Origin(default_of=field.owner.__name__ if field is not None else dotted(path[:-1]))
