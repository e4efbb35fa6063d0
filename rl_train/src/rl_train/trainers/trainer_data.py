"""Reads the data that is passed to a Python trainer, as paths, rows or sections, like the data of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.config.schema import DatasetConfig
from rl_core.config.validator import section_of_values
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.records import Dataset
from rl_core.plugins.component import Kind
from rl_core.plugins.registry import Registry
from rl_train.assembly.data import BadRows, Source, read_data, read_source
from rl_train.config.schema import DataConfig, section_of
from rl_train.config.values import expand_data_paths
from rl_train.data.arrow_rows import ArrowRows, is_dataset_dict, is_table
from rl_train.data.datasets import RecordDataset
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.records import Records, Rows, form_hint, open_rows
from rl_train.data.row_sections import (
    HuggingFaceSource,
    JsonLinesSource,
    ParquetSource,
    PreferenceFields,
    RecordFields,
    RowsConfig,
)
from rl_train.data.rows import csv_problem
from rl_train.files import looks_like_path

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

    def row_location(self, index: int) -> str:
        """The row's number, from 0."""
        return f"{self.name}, row {index}"


def read_python_data(
    dataset: Any, validation: Any, registry: Registry, *, wants_pairs: bool, wants_labels: bool = False
) -> tuple[DataConfig, Source, Source | None]:
    """The settings of all data, the training data, and the validation data if there is any.

    Args:
        dataset: A path (JSON lines, parquet, a folder) or the name of a dataset on the hub; rows, as a list of dicts or a
            `datasets.Dataset`; the section of a dataset, `{"dataset_name": ...}`, or of all data, `{"train": ..., "split":
            ...}`, as dicts or as models; or any map-style object of records.
        validation: The validation data, in any of these forms except the section of all data.
        registry: Used to look up datasets.
        wants_pairs: Whether rows without a section are preference pairs.
        wants_labels: Whether rows without a section are answers with a label.

    Raises:
        DataError: The data does not exist, or a row is invalid.
        ConfigError: A section is invalid.
    """
    data = _data_section(dataset, registry)
    keys = {"label_key": "label"} if wants_labels else {}
    preferences = PreferenceFields(dataset_name="rows", **keys) if wants_pairs or wants_labels else None
    read_one = partial(_source, registry=registry, preferences=preferences)
    if data is None:
        data, held_out = DataConfig(), None
        train: Source | None = read_one(dataset, "dataset", bad_rows=BadRows())
    else:
        train, held_out = read_data(data, registry)
    if train is None:
        raise ConfigError("The data section has no training data: set `train` or `mix`.")
    if validation is not None and held_out is not None:
        raise ConfigError("The data section and `validation=` both set the validation data: remove one of them.")
    if validation is not None:
        held_out = read_one(validation, "validation", bad_rows=train.bad_rows)
    return data, train, held_out


def _data_section(section: Any, registry: Registry) -> DataConfig | None:
    """The section of all data, if that is what was passed."""
    if isinstance(section, DataConfig):
        if section.validation_sets:
            raise ConfigError(_NO_VALIDATION_SETS)
        return section
    if not isinstance(section, Mapping) or "dataset_name" in section or is_dataset_dict(section):
        return None
    values = dict(section)
    if values.get("validation_sets"):
        raise ConfigError(_NO_VALIDATION_SETS)
    expand_data_paths(values)
    for key in ("train", "validation"):
        if values.get(key) is not None:
            values[key] = _dataset_section(values[key], f"data.{key}", registry)
    members = values.get("mix") or {}
    values["mix"] = {name: _dataset_section(member, f"data.mix.{name}", registry) for name, member in members.items()}
    return section_of_values(DataConfig, values, name="data")


def _dataset_section(dataset: Any, name: str, registry: Registry) -> DatasetConfig:
    if isinstance(dataset, DatasetConfig):
        return dataset
    if not isinstance(dataset, Mapping) or not isinstance(dataset.get("dataset_name"), str):
        raise ConfigError(f"{name} is {dataset!r}: expected the section of a dataset, with `dataset_name`.")
    component = registry.find("dataset", dataset["dataset_name"])
    section = section_of_values(section_of(component, Kind.DATASET), dataset, name=name)
    assert isinstance(section, DatasetConfig)
    return section


def _source(dataset: Any, name: str, *, registry: Registry, preferences: PreferenceFields | None, bad_rows: BadRows) -> Source:
    if isinstance(dataset, DatasetConfig | Mapping) and not is_dataset_dict(dataset):
        section = _dataset_section(dataset, name, registry)
        return read_source(section, registry, name=name, bad_rows=bad_rows)
    if isinstance(dataset, Dataset | Records):
        return Source(records=dataset, name=name, bad_rows=bad_rows)
    if isinstance(dataset, str | Path):
        name, rows = str(dataset), _rows_at(str(dataset))
    else:
        rows = _rows_in_memory(dataset, name)
    return Source(records=_records(rows, preferences), name=name, bad_rows=bad_rows)


def _rows_in_memory(rows: Any, name: str) -> Rows:
    if is_dataset_dict(rows):
        raise DataError(f"the {name} has the splits {', '.join(rows)}: pass one of them, such as [{next(iter(rows))!r}]")
    if is_table(rows):
        return ArrowRows([(f"the {name}", rows)], name=f"the {name}")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(
            f"the {name} is a {type(rows).__name__}, which has no indexed rows: pass a path, the name of a dataset on the "
            "hub, a list of dicts, a datasets.Dataset, or a section {'dataset_name': ...}"
        )
    return ListedRows(rows, name=f"the {name}")


def _rows_at(path_or_name: str) -> Rows:
    path = Path(path_or_name).expanduser()
    section: RowsConfig
    if (problem := csv_problem(path)) is not None:
        raise DataError(problem)
    if path.is_dir() or not (path.is_file() or looks_like_path(path_or_name) or path.suffix in _FILES):
        section = HuggingFaceSource(dataset_name="huggingface", path=str(path))
    elif path.suffix == ".parquet":
        section = ParquetSource(dataset_name="parquet", path=path)
    else:
        section = JsonLinesSource(dataset_name="jsonl", path=path)
    return open_rows(section)


def _records(rows: Rows, preferences: PreferenceFields | None) -> RecordDataset | PreferenceDataset:
    if preferences is not None:
        return PreferenceDataset(preferences, rows)
    return RecordDataset(RecordFields(dataset_name="rows", **(_keys_of(rows) if len(rows) else {})), rows)


def _keys_of(rows: Rows) -> dict[str, Any]:
    """The section keys for the fields of the first row."""
    try:
        fields = {key for key, value in rows[0].items() if value is not None}
    except DataError as error:
        raise DataError(f"{rows.row_location(0)}: {error}") from error
    if isinstance(rows[0].get("label"), bool) and "completion" in fields:
        raise DataError(
            f"{rows.row_location(0)} has {sorted(fields)}: answers with a label, on which KTOTrainer trains. Or pass the rows "
            "with a good completion, without `label`"
        )
    for wanted, keys in _FORMS:
        if wanted <= fields:
            return keys
    if hint := form_hint(rows[0]):
        raise DataError(f"{rows.row_location(0)} has {sorted(fields)}{hint}: {{'dataset_name': 'jsonl', 'path': ..., ...}}")
    raise DataError(
        f"{rows.row_location(0)} has {sorted(fields)}: expected `messages`, `prompt` with `completion`, or `question`. If "
        "the fields have other names, pass the section of a dataset: {'dataset_name': 'jsonl', 'path': ..., 'input_key': ...}"
    )
