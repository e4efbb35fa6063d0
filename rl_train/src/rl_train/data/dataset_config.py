"""Sections of the built-in datasets, which check their function, prompt template and first row. Does not import torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import RunSections
from rl_core.errors import DataError
from rl_core.plugins.component import did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_train.config.schema import DataConfig
from rl_train.data.records import PACKAGED
from rl_train.data.row_sections import (
    HuggingFaceSource,
    JsonLinesSource,
    OnBadRow,
    ParquetSource,
    PreferenceFields,
    RecordFields,
    RowsConfig,
)
from rl_train.data.rows import csv_problem, first_line, parsed
from rl_train.prompts.prompt_files import prompt_problem


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


_EMPTY = "{path} is empty: a dataset needs at least one row."


def row_conflicts(config: RowsConfig, data: DataConfig) -> Iterator[tuple[KeyPath, str]]:
    """The wrong keys of a dataset's section, each with the reason.

    Args:
        config: The section.
        data: The section `data`, whose `prompt` sets defaults of the dataset.
    """
    effective = data.with_prompt(config)
    wrong_keys = [*_function(config), *_template(config, effective)]
    yield from wrong_keys
    shared = data.prompt
    if shared is not None and shared.prompt_config and prompt_problem(shared.prompt_config, shared.examples_type):
        return  # reported at `data.prompt`
    if not wrong_keys and isinstance(config, JsonLinesSource):
        yield from _first_row(config, effective)
    elif isinstance(config, ParquetSource | HuggingFaceSource) and _is_empty(Path(config.path)):
        yield ("path",), _EMPTY.format(path=config.path)


def _function(config: RowsConfig) -> Iterator[tuple[KeyPath, str]]:
    name = config.record_fn
    if name is None or name in PACKAGED:
        return
    if not is_path(name):
        packaged = ", ".join(sorted(PACKAGED))
        yield (
            ("record_fn",),
            f"unknown function {name!r}.{did_you_mean(name, [*PACKAGED])} Use {packaged}, or the dotted path of a function.",
        )
    elif (problem := missing_target(name)) is not None:
        yield ("record_fn",), f"{name} cannot be imported: {problem}"


def _template(config: RowsConfig, effective: RowsConfig) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the prompt config and examples, if the dataset itself sets one of the two."""
    prompt, examples = (getattr(effective, key, None) for key in ("prompt", "examples_type"))
    own = [key for key in ("prompt", "examples_type") if getattr(config, key, None) is not None]
    if not own:
        return
    if prompt is None:
        yield ("examples_type",), "has no effect without a prompt config: set `prompt` or `data.prompt.prompt_config`."
    elif "prompt" in own and (problem := prompt_problem(prompt)) is not None:
        yield ("prompt",), problem
    elif examples is not None and (problem := prompt_problem(prompt, examples)) is not None:
        yield (own[-1],), problem


def _first_row(config: JsonLinesSource, effective: RowsConfig) -> Iterator[tuple[KeyPath, str]]:
    """Check the first row of a file. Does not call functions of the user."""
    if (problem := csv_problem(Path(config.path))) is not None:
        yield ("path",), f"{problem}."
        return
    try:
        first = first_line(Path(config.path))
    except (DataError, OSError, EOFError, zlib.error):
        # A folder, another format, or a compression that needs a library: reported by `--deep` and by the run.
        return
    if first is None:
        yield ("path",), _EMPTY.format(path=config.path)
    elif config.on_bad_row is OnBadRow.ERROR and (config.record_fn is None or config.record_fn in PACKAGED):
        from rl_train.data.datasets import RecordDataset, RecordReader
        from rl_train.data.preferences import PreferenceDataset

        try:
            try:
                if isinstance(effective, PreferenceFields):
                    PreferenceDataset.reader(effective).records(parsed(first[1]))
                elif isinstance(effective, RecordFields):
                    RecordReader(effective, with_examples=False).records(parsed(first[1]))
            except DataError:  # reported as by the run: all bad rows of the file
                (PreferenceDataset if isinstance(effective, PreferenceFields) else RecordDataset)(effective)
        except DataError as error:
            yield (error.key or "path",), str(error)


def _is_empty(path: Path) -> bool:
    """Whether there are files, and none has rows; not all empty ones are found, since Parquet files need pyarrow."""
    is_empty = False
    try:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                if _has_content(file):
                    return False
                is_empty = True
    except OSError:  # cannot be read: reported by `--deep` and by the run
        return False
    return is_empty


def _has_content(file: Path) -> bool:
    """Whether a file is not empty, and if it is a CSV or TSV file, whether a line follows its header."""
    if file.suffix.lower() not in (".csv", ".tsv"):
        return file.stat().st_size > 0
    with file.open(encoding="latin-1") as lines:
        return len([*islice(filter(str.strip, lines), 2)]) == 2
