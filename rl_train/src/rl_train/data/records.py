"""Sources of rows, and datasets of the records of their valid rows."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, overload

from rl_core.errors import ConfigError, DataError
from rl_train.data.arrow_rows import hugging_face_rows, parquet_rows
from rl_train.data.bad_rows import BadRow, BadRowsError, bad_row_lines
from rl_train.data.json_lines import JsonLines
from rl_train.data.nested_fields import with_nested_fields
from rl_train.data.record_functions import load_record_function
from rl_train.data.row_sections import HuggingFaceSource, JsonLinesSource, OnBadRow, ParquetSource, RowsConfig
from rl_train.user_code import reporting_errors

ConfigT = TypeVar("ConfigT", bound=RowsConfig)
RecordT = TypeVar("RecordT")

SKIP_BAD_ROWS = "Set `on_bad_row: skip` in the section of the dataset to continue without bad rows"


class Rows(Protocol):
    """A source of rows by index, each with a location for error messages."""

    name: str
    """Name of the source in errors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """The fields of a row.

        Raises:
            DataError: It cannot be read.
        """
        ...

    def row_location(self, index: int) -> str:
        """Location of the row: file and line, or file and row number."""
        ...


class RowReader(ABC, Generic[ConfigT, RecordT]):
    """Turns the fields of a row into records, by the keys of the config or by its function.

    Args:
        config: The meaning of the fields.

    Raises:
        ConfigError: The function does not exist.
    """

    called: ClassVar[str]
    """Name of a record in errors."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config
        self._nested = config.nested_fields
        self.function = None if config.record_fn is None else load_record_function(config.record_fn)

    def with_nested(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the nested fields that the config names."""
        return with_nested_fields(row, self._nested) if self._nested else row

    def made(self, row: dict[str, Any]) -> Any:
        """What the function of the config, which must have one, returns for a row.

        Raises:
            ConfigError: It raised.
        """
        assert self.function is not None
        with reporting_errors(f"record_fn {self.config.record_fn}", self.function):
            return self.function(row)

    @abstractmethod
    def records(self, row: dict[str, Any]) -> Sequence[RecordT]:
        """The records of one row.

        Raises:
            DataError: The row is invalid.
        """

    @abstractmethod
    def kind(self, record: Any) -> Hashable:
        """Features of a record that a chat template may not support: its roles and tool use."""

    @abstractmethod
    def prompt_of(self, row: dict[str, Any]) -> Any:
        """The prompt of a valid row, without template and system message; identifies the row."""


class Records(Sequence[RecordT]):
    """The records of the rows of a source.

    All rows are checked once, at the start. Records are created again on each access, so that sources may keep rows on disk.

    Args:
        config: The source, its fields, and how invalid rows are handled.
        rows: The source, replacing that of the config.

    Attributes:
        config: The same.
        skipped: Number of invalid rows skipped with `on_bad_row: skip`.
        reasons: Their locations and reasons, by cause.
        firsts: Index of the first record of every kind.
        fingerprint: Hash of all records in order. If it differs, a resumed run would not continue with the same rows.

    Raises:
        DataError: The source does not exist or has no valid row, or rows are invalid; the message has the locations of all.
    """

    reader: ClassVar[type[RowReader[Any, Any]]]
    """Turns rows into records."""

    def __init__(self, config: RowsConfig, rows: Rows | None = None) -> None:
        key_of_rows = "path" if rows is None else None
        rows, form = open_rows(config) if rows is None else rows, self.reader(config)
        self.config = config
        self._rows = rows
        self._form = form
        self._index: list[tuple[int, int]] = []
        kinds: dict[Any, int] = {}
        bad: list[BadRow] = []
        key = None
        seen = hashlib.blake2b(digest_size=8)
        for number in range(len(rows)):
            try:
                records = form.records(rows[number])
            except DataError as error:
                bad.append(BadRow.of(rows.row_location(number), error))
                key = key or error.key or key_of_rows
            except ConfigError as error:  # a bug in a user's function
                raise ConfigError(f"{rows.row_location(number)}: {error}") from error
            else:
                for part, record in enumerate(records):
                    kinds.setdefault(form.kind(record), len(self._index))
                    self._index.append((number, part))
                    # Values that JSON cannot represent are hashed by type: a repr may contain an address of this process.
                    seen.update(json.dumps(record, skipkeys=True, default=lambda value: type(value).__name__).encode())
        if bad and config.on_bad_row is OnBadRow.ERROR:
            raise BadRowsError(bad, total=len(rows), rows_of=f"{len(rows)} rows of {rows.name}", remedy=SKIP_BAD_ROWS, key=key)
        self.skipped, self.reasons = len(bad), bad_row_lines(bad)
        self.firsts = tuple(kinds.values())
        self.fingerprint = seen.hexdigest()
        if not self._index:
            why = f"{self.skipped} bad rows skipped; the first: {bad[0]}" if bad else "it is empty"
            raise DataError(f"{rows.name} has no {form.called} to train on ({why})")

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> RecordT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordT]: ...

    def __getitem__(self, index: int | slice) -> RecordT | list[RecordT]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number, part = self._index[index]
        record: RecordT = self._form.records(self._rows[number])[part]
        return record

    def row_location(self, index: int) -> str:
        """Location of the row of a record."""
        return self._rows.row_location(self._index[index][0])

    def prompt_of(self, index: int) -> Any:
        """The prompt of the row of a record: equal for all records of the row."""
        return self._form.prompt_of(self._rows[self._index[index][0]])


def open_rows(config: RowsConfig) -> Rows:
    """The rows of a config's source.

    Raises:
        DataError: The path of the config has no data.
    """
    match config:
        case JsonLinesSource():
            return JsonLines(config.path)
        case ParquetSource():
            return parquet_rows(config.path)
        case HuggingFaceSource():
            return hugging_face_rows(config.path, subset=config.subset, split=config.split, revision=config.revision)
    raise TypeError(f"{type(config).__name__} is not a source of rows: derive it from a source in dataset_config")
