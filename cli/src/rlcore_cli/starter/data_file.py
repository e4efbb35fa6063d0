"""Reads a data file in any of the usual formats; formats that no dataset reads are converted to JSON Lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_train.data.bad_rows import BadRow

_TABLES = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""Separators that are tried, by file extension; the first is the usual one."""
SKIP_BAD_ROWS = "With `--skip-bad-rows`, `rlcore init` continues without them"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """The rows of a file, and the dataset that reads it."""

    path: Path
    dataset: str
    """`jsonl` or `parquet`."""
    rows: Sequence[dict[str, Any]]
    locations: Sequence[str] = ()
    """Location of each row, if the file must be converted to JSON Lines because no dataset reads it."""
    bad: Sequence[BadRow] = ()
    """Rows that cannot be read; their dataset reports those of a file that is not converted."""

    @property
    def converted(self) -> bool:
        """Whether the rows must be written as JSON Lines first."""
        return bool(self.locations)


def read_data_file(path: Path, *, skip_bad_rows: bool = False) -> DataFile:
    """The rows of a JSON Lines, JSON, Parquet, CSV or TSV file.

    The values of CSV and TSV files stay texts, so that `007` is not read as 7.

    Raises:
        DataError: The file does not exist, is in none of these formats, or has no valid row.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}: give a JSON Lines, JSON, Parquet, CSV or TSV file")
    if path.suffix.lower() in _TABLES:
        data = _table(path)
    elif path.suffix.lower() == ".parquet":
        from rl_train.data.arrow_rows import parquet_rows

        table = parquet_rows(path)
        data = DataFile(path=path, dataset="parquet", rows=[table[number] for number in range(len(table))])
    elif (array := _json_array(path)) is not None:
        locations = [f"{path}, row {number}" for number in range(1, len(array) + 1)]
        data = DataFile(path=path, dataset="jsonl", rows=array, locations=locations)
    else:
        data = DataFile(path=path, dataset="jsonl", rows=_json_lines(path))
    if data.bad and not (skip_bad_rows and data.rows):
        from rl_train.data.bad_rows import BadRowsError

        total = len(data.rows) + len(data.bad)
        raise BadRowsError(data.bad, total=total, rows_of=f"{total} rows of {path}", remedy=SKIP_BAD_ROWS)
    if not data.rows:
        raise DataError(f'{path} has no rows: add at least one, such as {{"question": "2+2=", "answer": "4"}}')
    return data


def _json_lines(path: Path) -> list[dict[str, Any]]:
    from rl_train.data.json_lines import JsonLines

    lines, rows = JsonLines(path), []
    for number in range(len(lines)):
        try:
            rows.append(lines[number])
        except DataError as error:  # the dataset reports it with the other bad rows, unless all are
            if number + 1 == len(lines) and not rows:
                raise DataError(f"{lines.row_location(number)}: {error}") from error
    return rows


def _json_array(path: Path) -> list[dict[str, Any]] | None:
    """The objects of a file that is one JSON array; None for any other file."""
    from rl_train.data.strict_json import read_json

    with path.open("rb") as file:
        if not file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return None
    try:
        rows = read_json(path.read_text(encoding="utf-8-sig"))
    except (DataError, ValueError) as error:
        raise DataError(f"{path} is invalid JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}: element {number} is a {type(row).__name__}, but an object with fields is expected")
    return list(rows)


def _table(path: Path) -> DataFile:
    """The rows of a CSV or TSV file; those with another number of values than there are columns are bad."""
    from rl_train.data.bad_rows import BadRow

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separators = _TABLES[path.suffix.lower()]
            reader = csv.reader(file, delimiter=max(separators, key=lambda each: len(_split(first, each))), strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header) or "" in header:
                raise DataError(f"{path}:1: the first line must name each column once, but it is {header}")
            rows, bad = {}, []
            for values in reader:
                location = f"{path}:{reader.line_num}"
                if len(values) == len(header):
                    rows[location] = dict(zip(header, values, strict=True))
                elif values:
                    reason = f"{len(values)} values, but the file has {len(header)} columns ({', '.join(header)})"
                    bad.append(BadRow(location=location, reason=reason, cause=reason))
            return DataFile(path=path, dataset="jsonl", rows=[*rows.values()], locations=[*rows], bad=bad)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}. Save it as UTF-8") from error


def _split(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def json_lines_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
