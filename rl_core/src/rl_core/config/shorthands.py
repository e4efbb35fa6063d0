"""Writes out what a config may say in short: `data.train_data_path` is `data.train` with the dataset `jsonl`."""

from __future__ import annotations

from typing import Any

from rl_core.config.written import Path, Written

_DATA_PATHS = {"train_data_path": "train", "val_data_path": "validation"}


def expand_shorthands(
    values: dict[str, Any], *, written: Written, through: dict[Path, str]
) -> tuple[dict[str, Any], Written, dict[Path, str]]:
    """The config with its shorthands written out; each value keeps the place at which the user wrote it.

    Where both forms are there nothing is done: the model of `data` refuses that.

    Args:
        values: The plain values; changed in place.
        written: The same as it was written.
        through: The interpolations by path.
    """
    for short, split in _DATA_PATHS.items():
        data = values.get("data")
        if not isinstance(data, dict) or data.get(short) is None or data.get(split) is not None:
            continue
        data[split] = {"dataset_name": "jsonl", "path": data.pop(short)}
        section = written.at(("data",))
        if section is not None and isinstance(section.value, dict):
            path = section.value[short]
            dataset = Written({"path": path}, place=path.key_place, key_place=path.key_place)
            keys = {key: item for key, item in section.value.items() if key != short}
            data_section = Written({**keys, split: dataset}, place=section.place, key_place=section.key_place)
            root = {**written.value, "data": data_section}
            written = Written(root, place=written.place, key_place=written.key_place)
        if ("data", short) in through:
            through["data", split, "path"] = through.pop(("data", short))
    return values, written, through
