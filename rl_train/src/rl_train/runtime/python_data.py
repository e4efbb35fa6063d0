"""Reads the data that is passed to a Python trainer, as paths, rows or sections, like the data of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_core.config.python_sections import section_of_values
from rl_core.config.schema import DatasetConfig
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.dataset import Dataset
from rl_core.plugins.component import Kind
from rl_core.plugins.registry import Registry
from rl_train.config.aliases import expand_data_paths
from rl_train.config.path_lookup import looks_like_path
from rl_train.config.schema import DataConfig
from rl_train.config.section_resolver import section_of
from rl_train.data.arrow_rows import ArrowRows, is_split, is_table
from rl_train.data.dataset_config import (
    HuggingFaceSource,
    JsonLinesSource,
    ParquetSource,
    PreferenceForm,
    RecordForm,
    RowsConfig,
)
from rl_train.data.datasets import RecordDataset
from rl_train.data.json_lines import csv_problem
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.records import Records, Rows
from rl_train.data.sources import open_rows
from rl_train.runtime.data import BadRows, Source, read_data, read_source

_FORMS: tuple[tuple[frozenset[str], dict[str, Any]], ...] = (
    (frozenset({"messages"}), {"record_fn": "record"}),
    (frozenset({"prompt", "completion"}), {"input_key": "prompt", "response_key": "completion", "output_key": None}),
    (frozenset({"question", "expected_answer"}), {}),
    (frozenset({"question"}), {"output_key": None}),
)
"""Fields that identify the form of a row without a section, and the section keys for it; the first match is used."""
_NO_VALIDATION_SETS = (
    "data.validation_sets: a Python trainer validates on one dataset, so these would have no effect. Pass one of them as "
    "`validation=`, or use a config file."
)
_FILES = (".parquet", ".json", ".gz", ".zst")


class ListedRows:
    """Rows in memory.

    Args:
        rows: The fields of each row.
        name: Name of the data in error messages.
    """

    def __init__(self, rows: Sequence[Any], *, name: str) -> None:
        self.name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"it is a {type(row).__name__}: expected a mapping of its fields")
        return dict(row)

    def place(self, index: int) -> str:
        """The row's number, from 0."""
        return f"{self.name}, row {index}"


def read_python_data(
    dataset: Any, validation: Any, registry: Registry, *, wants_pairs: bool
) -> tuple[DataConfig, Source, Source | None]:
    """The settings of all data, the training data, and the validation data if there is any.

    Args:
        dataset: A path (JSON lines, parquet, a folder) or the name of a dataset on the hub; rows, as a list of dicts or a
            `datasets.Dataset`; the section of a dataset, `{"dataset_name": ...}`, or of all data, `{"train": ..., "split":
            ...}`, as dicts or as models; or any map-style object of records.
        validation: The validation data, in any of these forms except the section of all data.
        registry: Used to look up datasets.
        wants_pairs: Whether rows without a section are preference pairs.

    Raises:
        DataError: The data does not exist, or a row is invalid.
        ConfigError: A section is invalid.
    """
    data = _data_section(dataset, registry)
    read = partial(_source, registry=registry, wants_pairs=wants_pairs)
    if data is None:
        data, held_out = DataConfig(), None
        train: Source | None = read(dataset, "dataset", bad_rows=BadRows())
    else:
        train, held_out = read_data(data, registry)
    if train is None:
        raise ConfigError("The data section has no training data: set `train` or `mix`.")
    if validation is not None and held_out is not None:
        raise ConfigError("The data section and `validation=` both set the validation data: remove one of them.")
    if validation is not None:
        held_out = read(validation, "validation", bad_rows=train.bad_rows)
    return data, train, held_out


def section_from(model: Any, given: Any, name: str) -> Any:
    """A section from a dict of its keys; a section is returned unchanged.

    Args:
        model: The section's model.
        given: The dict, the section, or None for the defaults.
        name: Name of the section in error messages.

    Raises:
        ConfigError: A key is unknown or invalid; all such keys are listed.
    """
    if isinstance(given, BaseModel):
        return given
    return section_of_values(model, given or {}, name=name)


def _data_section(given: Any, registry: Registry) -> DataConfig | None:
    """The section of all data, if that is what was passed."""
    if isinstance(given, DataConfig):
        if given.validation_sets:
            raise ConfigError(_NO_VALIDATION_SETS)
        return given
    if not isinstance(given, Mapping) or "dataset_name" in given or is_split(given):
        return None
    values = dict(given)
    if values.get("validation_sets"):
        raise ConfigError(_NO_VALIDATION_SETS)
    expand_data_paths(values)
    for key in ("train", "validation"):
        if values.get(key) is not None:
            values[key] = _dataset_section(values[key], f"data.{key}", registry)
    members = values.get("mix") or {}
    values["mix"] = {name: _dataset_section(member, f"data.mix.{name}", registry) for name, member in members.items()}
    data: DataConfig = section_from(DataConfig, values, "data")
    return data


def _dataset_section(given: Any, name: str, registry: Registry) -> DatasetConfig:
    if isinstance(given, DatasetConfig):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("dataset_name"), str):
        raise ConfigError(f"{name} is {given!r}: expected the section of a dataset, with `dataset_name`.")
    component = registry.find("dataset", given["dataset_name"])
    section: DatasetConfig = section_from(section_of(component, Kind.DATASET), given, name)
    return section


def _source(given: Any, name: str, *, registry: Registry, wants_pairs: bool, bad_rows: BadRows) -> Source:
    if isinstance(given, DatasetConfig | Mapping) and not is_split(given):
        section = _dataset_section(given, name, registry)
        return read_source(section, registry, name=name, bad_rows=bad_rows)
    if isinstance(given, Dataset | Records):
        return Source(records=given, name=name, bad_rows=bad_rows)
    if isinstance(given, str | Path):
        name, rows = str(given), _rows_at(str(given))
    else:
        rows = _rows_in_memory(given, name)
    return Source(records=_records(rows, wants_pairs=wants_pairs), name=name, bad_rows=bad_rows)


def _rows_in_memory(given: Any, name: str) -> Rows:
    if is_split(given):
        raise DataError(f"the {name} has the splits {', '.join(given)}: pass one of them, such as [{next(iter(given))!r}]")
    if is_table(given):
        return ArrowRows([(f"the {name}", given)], name=f"the {name}")
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise DataError(
            f"the {name} is a {type(given).__name__}, which has no indexed rows: pass a path, the name of a dataset on the "
            "hub, a list of dicts, a datasets.Dataset, or a section {'dataset_name': ...}"
        )
    return ListedRows(given, name=f"the {name}")


def _rows_at(given: str) -> Rows:
    path = Path(given).expanduser()
    section: RowsConfig
    if (problem := csv_problem(path)) is not None:
        raise DataError(problem)
    if path.is_dir() or not (path.is_file() or looks_like_path(given) or path.suffix in _FILES):
        section = HuggingFaceSource(dataset_name="huggingface", path=str(path))
    elif path.suffix == ".parquet":
        section = ParquetSource(dataset_name="parquet", path=path)
    else:
        section = JsonLinesSource(dataset_name="jsonl", path=path)
    return open_rows(section)


def _records(rows: Rows, *, wants_pairs: bool) -> RecordDataset | PreferenceDataset:
    if wants_pairs:
        return PreferenceDataset(PreferenceForm(dataset_name="rows"), rows)
    return RecordDataset(RecordForm(dataset_name="rows", **(_keys_of(rows) if len(rows) else {})), rows)


def _keys_of(rows: Rows) -> dict[str, Any]:
    """The section keys for the fields of the first row."""
    try:
        fields = {key for key, value in rows[0].items() if value is not None}
    except DataError as error:
        raise DataError(f"{rows.place(0)}: {error}") from error
    for wanted, keys in _FORMS:
        if wanted <= fields:
            return keys
    raise DataError(
        f"{rows.place(0)} has {sorted(fields)}: expected `messages`, `prompt` with `completion`, or `question`. If "
        "the fields have other names, pass the section of a dataset: {'dataset_name': 'jsonl', 'path': ..., 'input_key': ...}"
    )
