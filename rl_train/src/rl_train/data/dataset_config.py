"""Sections of the built-in datasets. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import RunSections
from rl_core.config.source_tree import KeyPath
from rl_train.data.dataset_checks import row_conflicts
from rl_train.data.row_sections import (
    HuggingFaceSource,
    JsonLinesSource,
    ParquetSource,
    PreferenceFields,
    RecordFields,
    RowsConfig,
)
from rl_train.data.row_sections import OnTooLong as OnTooLong


class CheckedRows(RowsConfig):
    """Rows whose function, template and first row are checked with the config."""

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Functions and templates that do not exist, and an invalid first row."""
        yield from row_conflicts(self, run.data)


class JsonlDatasetConfig(CheckedRows, RecordFields, JsonLinesSource):
    """Prompts or conversations in a JSON Lines file."""

    dataset_name: str = "jsonl"
    """Name of a registered dataset, or the dotted path of its class."""


class ParquetDatasetConfig(CheckedRows, RecordFields, ParquetSource):
    """Prompts or conversations in Parquet files."""

    dataset_name: str = "parquet"
    """Name of a registered dataset, or the dotted path of its class."""


class HuggingFaceDatasetConfig(CheckedRows, RecordFields, HuggingFaceSource):
    """Prompts or conversations in a Hugging Face dataset."""

    dataset_name: str = "huggingface"
    """Name of a registered dataset, or the dotted path of its class."""


class PreferenceDatasetConfig(CheckedRows, PreferenceFields, JsonLinesSource):
    """Preferences in a JSON Lines file."""

    dataset_name: str = "preference"
    """Name of a registered dataset, or the dotted path of its class."""


class ParquetPreferenceDatasetConfig(CheckedRows, PreferenceFields, ParquetSource):
    """Preferences in Parquet files."""

    dataset_name: str = "preference_parquet"
    """Name of a registered dataset, or the dotted path of its class."""


class HuggingFacePreferenceDatasetConfig(CheckedRows, PreferenceFields, HuggingFaceSource):
    """Preferences in a Hugging Face dataset."""

    dataset_name: str = "preference_huggingface"
    """Name of a registered dataset, or the dotted path of its class."""
