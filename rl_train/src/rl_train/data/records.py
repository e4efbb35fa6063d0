"""Sources of rows, datasets of the records of their valid rows, and reports of the others.

A function that turns the fields of a row into a record (`record_fn`), packaged or given by a path, raises `DataError` for an
invalid row, which is then reported with its location, or skipped. Any other exception is a bug in it and ends the run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import string
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, overload

from rl_core.errors import ConfigError, DataError, format_value
from rl_core.plugins.component import is_path
from rl_core.plugins.import_path import resolve
from rl_train.data.arrow_rows import hugging_face_rows, parquet_rows
from rl_train.data.benchmarks import LAYOUTS, layout_hint, text_field
from rl_train.data.conversations import Messages, from_text
from rl_train.data.image_sources import IMAGE_FIELDS, ImageSource, folder_of, image_identity, images_of_row, placed
from rl_train.data.row_sections import HuggingFaceSource, JsonLinesSource, OnBadRow, ParquetSource, RowsConfig
from rl_train.data.rows import JsonLines
from rl_train.errors import reporting_errors

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
        self._folder = folder_of(getattr(config, "path", None))
        self.function = None if config.record_fn is None else load_record_function(config.record_fn)

    def with_nested(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the nested fields that the config names."""
        return with_nested_fields(row, self._nested) if self._nested else row

    def made(self, row: dict[str, Any]) -> Any:
        """What the function of the config, which must have one, returns for a row, without images if `images_key` is null.

        Raises:
            ConfigError: It raised.
        """
        assert self.function is not None
        if self.config.images_key is None:
            row = {key: value for key, value in row.items() if key not in IMAGE_FIELDS}
        with reporting_errors(f"record_fn {self.config.record_fn}", self.function):
            return self.function(row)

    def with_images(self, messages: Messages, row: Mapping[str, Any]) -> Messages:
        """The messages of a row with its images, see `image_sources.placed`."""
        images, key = images_of_row(row, self.config.images_key, is_named=self.config.names_images)
        return placed(messages, images, key=key, folder=self._folder)

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
                    seen.update(json.dumps(record, skipkeys=True, default=_hashed_value).encode())
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


def _hashed_value(value: Any) -> str:
    """An image, or the type of another value that JSON cannot represent: a repr may contain an address of this process."""
    return image_identity(value) if isinstance(value, ImageSource) else type(value).__name__


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


RecordFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """{instruction, input, output} as a conversation of two messages; `input` may be empty or missing."""
    instruction, answer = text_field(row, "instruction"), text_field(row, "output")
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise DataError(f"the field 'input' is {format_value(given)}: expected a text")
    question = f"{instruction}\n\n{given}" if given else instruction
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """{question, answer}, where the number after `####` in the answer is what the environment expects."""
    question, answer = text_field(row, "question"), text_field(row, "answer")
    _, mark, number = answer.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"the field 'answer' has no number after ####: {answer[-60:]!r}")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "extra_env_info": {"expected_answer": number.strip().replace(",", "")}}


_RECORD = ("messages", "images", "tools", "extra_env_info", "task_name", "stop_strings")


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """{messages} with optional images, tools, extra_env_info, task_name and stop_strings: an unchanged record."""
    if row.get("messages") is None:
        raise DataError(f"the field 'messages' is missing: the row has {sorted(row)}{form_hint(row)}")
    return {key: row[key] for key in _RECORD if row.get(key) is not None}


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


def sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """{conversations: [{from, value}]}, with optional `system` and `tools`; the value of a `function_call` is JSON.

    A row with `images` or `image` may have `<image>` in its values, at the place of each, as LLaVA's data does.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise DataError(f"the field 'conversations' is {format_value(turns)}: expected a list of {{from, value}}")
    messages: list[dict[str, Any]] = []
    images = row.get("images") or row.get("image")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or turn.get("from") not in _SHAREGPT_ROLES:
            raise DataError(
                f"turn {number} of 'conversations' is {format_value(turn)}: expected `from` in {', '.join(_SHAREGPT_ROLES)}"
            )
        message = {"role": _SHAREGPT_ROLES[turn["from"]], "content": _with_marked_images(turn.get("value"), images)}
        if turn["from"] == "function_call":
            called = from_text(turn.get("value"), f"the call in turn {number}")
            message.update(content="", tool_calls=called if isinstance(called, list) else [called])
        messages.append(message)
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return {"messages": messages, "tools": row.get("tools") or [], **({"images": images} if images else {})}


def _with_marked_images(value: Any, images: Any) -> Any:
    """The content of a turn, in which `<image>` is the place of an image if the row has any."""
    if not images or not isinstance(value, str) or "<image>" not in value:
        return value
    first, *others = value.split("<image>")
    parts = [first, *(part for text in others for part in (None, text))]
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in parts if text != ""]


PACKAGED: Mapping[str, RecordFunction] = {
    **LAYOUTS,
    **{function.__name__: function for function in (alpaca, gsm8k, record, sharegpt)},
}
_FIELDS = {"sharegpt": {"conversations"}, "alpaca": {"instruction", "output"}}


def form_hint(row: Mapping[str, Any]) -> str:
    """The rest of an error about a row that has the fields of a packaged function; '' for other rows."""
    found = next((name for name, fields in _FIELDS.items() if fields <= row.keys()), None)
    return layout_hint(row) if found is None else f". It has the fields of {found}: set `record_fn: {found}`"


def load_record_function(name: str) -> RecordFunction:
    """The packaged function of this name, or the one at this path.

    Raises:
        ConfigError: The function does not exist.
    """
    if name not in PACKAGED and not is_path(name):
        raise ConfigError(f"record_fn is {name!r}: expected {', '.join(sorted(PACKAGED))}, or the path of a function.")
    return PACKAGED[name] if name in PACKAGED else load_function(name, "record_fn")


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module.function` or `package.module:function`.

    Args:
        path: The import path.
        key: The config key of the function, for errors.

    Raises:
        ConfigError: The module cannot be imported, or has no such function.
    """
    function: Callable[..., Any] = resolve(path, key=key)
    if not callable(function):
        raise ConfigError(f"`{key}`: {path!r} is {function!r}, not a function.")
    return function


_MOST_SPANS = 200
"""Most locations of a cause that are listed; consecutive rows are one."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used; rows with the same `cause` failed the same check."""

    location: str
    reason: str
    cause: Hashable

    @classmethod
    def of(cls, location: str, error: DataError) -> BadRow:
        """The row at a location, for which an error was raised and caught."""
        inner = error.__cause__.__traceback__ if isinstance(error.__cause__, DataError) else None  # of one image of the row
        frames = [*traceback.walk_tb(error.__traceback__), *traceback.walk_tb(inner)]
        return cls(
            location=location,
            reason=str(error),
            cause=tuple((frame.f_code.co_filename, line) for frame, line in frames),
        )

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class BadRowError(DataError):
    """A row cannot be used."""

    def __init__(self, row: BadRow) -> None:
        super().__init__(str(row))
        self.row = row


class BadRowsError(DataError):
    """Some or all rows cannot be used.

    Args:
        rows: The bad rows; at least one.
        total: Number of rows that were read.
        rows_of: Names these rows after "9 of", such as "60 rows of pairs.jsonl".
        remedy: How to continue without bad rows.
        key: The config key at fault.
    """

    def __init__(self, rows: Sequence[BadRow], *, total: int, rows_of: str, remedy: str, key: str | None = None) -> None:
        lines, text = bad_row_lines(rows), str(rows[0]).rstrip(".")
        if len(rows) == total > 1 and len(lines) == 1:
            text += f". It is the same in all {total} rows"
        elif len(rows) > 1:
            text = f"{len(rows)} of {rows_of} cannot be used:" + "".join(f"\n  {line}" for line in lines)
        super().__init__(text if len(rows) == total else f"{text}{'. ' if len(rows) == 1 else chr(10)}{remedy}", key=key)
        self.rows, self.total, self.rows_of = rows, total, rows_of


def bad_row_lines(rows: Sequence[BadRow]) -> list[str]:
    """For each cause, the most frequent first: the locations of all its rows, and the reason of the first."""
    by_cause: dict[Hashable, list[BadRow]] = {}
    for row in rows:
        by_cause.setdefault(row.cause, []).append(row)
    groups = sorted(by_cause.values(), key=len, reverse=True)
    return [f"{_locations(group)}: {group[0].reason}" for group in groups]


def _locations(rows: Sequence[BadRow]) -> str:
    """`rows.jsonl:3, 7-9`, or of several files one after the other. A location of a user's dataset may have no number."""
    by_prefix: dict[str, list[int]] = {}
    for row in rows:
        prefix = row.location.rstrip(string.digits)
        numbers = by_prefix.setdefault(prefix, [])
        if number := row.location.removeprefix(prefix):
            numbers.append(int(number))
    return "; ".join(f"{prefix}{_spans(numbers)}" for prefix, numbers in by_prefix.items())


def _spans(numbers: Sequence[int]) -> str:
    spans = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), lambda at: at[1] - at[0]):
        first, *others = (number for _, number in run)
        spans.append(f"{first}-{others[-1]}" if others else str(first))
    more = f" and {len(spans) - _MOST_SPANS} more" if len(spans) > _MOST_SPANS else ""
    return ", ".join(spans[:_MOST_SPANS]) + more


def field_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field, None if the row has none. `a.b` is the field of this name, or else the key `b` of the field `a`."""
    value: Any = row
    for key in [name] if name in row else name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_nested_fields(row: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The row with the nested fields of these names in addition, even if they are null, except those that it lacks."""
    found = {}
    for parent, _, key in (name.rpartition(".") for name in names if name not in row):
        if isinstance(fields := field_value(row, parent), Mapping) and key in fields:
            found[f"{parent}.{key}"] = fields[key]
    return {**row, **found}
