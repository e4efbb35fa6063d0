"""Expands short forms in a config: `data.train_data_path` means `data.train` with the dataset `jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_core.config.source_tree import KeyPath, Node

if TYPE_CHECKING:
    from rl_train.config.overrides import Override

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


def expand_aliases(
    values: dict[str, Any], *, written: Node, interpolations: dict[KeyPath, str]
) -> tuple[dict[str, Any], Node, dict[KeyPath, str]]:
    """The config with its short forms expanded; each value keeps the location where the user wrote it.

    Args:
        values: The plain values; changed in place.
        written: The same values with their source locations.
        interpolations: The text of each interpolation, by its path.
    """
    data = values.get("data")
    for short, split in expand_data_paths(data) if isinstance(data, dict) else ():
        section = written.at(("data",))
        if section is not None and isinstance(section.value, dict):
            path = section.value[short]
            given = section.value.get(split)
            others = given.value if given is not None and isinstance(given.value, dict) else {}
            dataset = Node({**others, "path": path}, location=path.key_location, key_location=path.key_location)
            keys = {key: item for key, item in section.value.items() if key != short}
            data_section = Node({**keys, split: dataset}, location=section.location, key_location=section.key_location)
            root = {**written.value, "data": data_section}
            written = Node(root, location=written.location, key_location=written.key_location)
        if ("data", short) in interpolations:
            interpolations["data", split, "path"] = interpolations.pop(("data", short))
    return values, written, interpolations
