"""Rows of JSON Lines files, compressed or not, with line numbers. Rejects JSON that a lenient parser would change."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from rl_core.errors import DataError

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
"""Magic bytes, which are used instead of file extensions."""


class JsonLines:
    """The JSON objects of a file, one per line; blank lines are skipped. Files may be compressed with gzip or zstd.

    Args:
        path: The file.
        arrays: Whether the file may also be one JSON array of objects.

    Raises:
        DataError: The file does not exist or is not in JSON Lines format.
    """

    def __init__(self, path: Path, *, arrays: bool = False) -> None:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            more = ", or read a folder with `dataset_name: huggingface`" if path.is_dir() else ""
            raise DataError(f"dataset {path} {what}: give the path of a JSON Lines file{more}")
        if (problem := csv_problem(path)) is not None:
            raise DataError(problem)
        self.name = str(path)
        content = _content(path).removeprefix(b"\xef\xbb\xbf")
        is_array = content.lstrip().startswith(b"[")
        if is_array and not arrays:
            raise DataError(
                f"dataset {path} starts with '[', so it is one JSON array: write one JSON object per line "
                "(jq -c '.[]' converts it)"
            )
        self._elements = read_json(_decoded(content)) if is_array else None
        lines = [] if is_array else content.split(b"\n")
        self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines if self._elements is None else self._elements)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return parsed(self._lines[index][1]) if self._elements is None else dict(_object_of(self._elements[index]))

    def row_location(self, index: int) -> str:
        """File and line, from 1; for an array, file and row, from 0."""
        return f"{self.name}:{self._lines[index][0]}" if self._elements is None else f"{self.name}, row {index}"


def csv_problem(path: Path) -> str | None:
    """An error message for a CSV or TSV file, by its extension; None for any other file."""
    if path.suffix.lower() not in (".csv", ".tsv"):
        return None
    return (
        f"{path} is a {path.suffix[1:].upper()} file, but JSON lines are expected. `rlcore init {path.name}` converts it; or "
        "put it into a separate folder and read that with `dataset_name: huggingface`"
    )


def first_line(path: Path) -> tuple[int, bytes] | None:
    """The number, from 1, and the content of the first line that is not blank; None if there is none. Reads no further.

    Raises:
        DataError: The file is in a format that is read only as a whole.
        OSError: It cannot be read.
    """
    with path.open("rb") as raw:
        start = raw.read(4)
    if start.startswith((*_UTF_16, _ZSTD, _PARQUET)):
        raise DataError(f"dataset {path} cannot be read line by line")
    with gzip.open(path) if start.startswith(_GZIP) else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf")
            if content.strip():
                if content.lstrip().startswith(b"["):
                    raise DataError(f"dataset {path} is one JSON array")
                return number, content
    return None


def _content(path: Path) -> bytes:
    """The bytes of a file, decompressed."""
    content = path.read_bytes()
    if content.startswith(_PARQUET):
        raise DataError(f"dataset {path} is a Parquet file: read it with `dataset_name: parquet`")
    if content.startswith(_UTF_16):
        raise DataError(f"dataset {path} is encoded in UTF-16: save it as UTF-8")
    try:
        if content.startswith(_GZIP):
            return gzip.decompress(content)
        return _from_zstd(content) if content.startswith(_ZSTD) else content
    except ImportError as error:
        raise DataError(
            f"reading {path} needs a package that is not installed ({error}): pip install 'rl-train[data]'"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"dataset {path} cannot be decompressed ({error}): it is corrupt or incomplete") from error


def _from_zstd(content: bytes) -> bytes:
    import pyarrow

    with pyarrow.input_stream(pyarrow.BufferReader(content), compression="zstd") as stream:
        whole: bytes = stream.read()
    return whole


def parsed(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        DataError: It is not a JSON object.
    """
    return _object_of(read_json(_decoded(line, " of the line")))


def _decoded(content: bytes, where: str = "") -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"invalid UTF-8 ({error.reason} at byte {error.start + 1}{where})") from error


def _object_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found a {type(value).__name__}")
    return value


def read_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        DataError: It is not valid JSON, or an object has a duplicate key, for which JSON defines no meaning.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"invalid JSON ({error.msg} at {line}column {error.colno})") from error
    except ValueError as error:
        # Python rejects integers of more digits, because the time of the conversion grows with their square.
        raise DataError(
            f"unsupported JSON (it has an integer of more than {sys.get_int_max_str_digits()} digits): write the integer in "
            "quotes, as text"
        ) from error
    except RecursionError as error:
        raise DataError("unsupported JSON (it is nested too deeply)") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} occurs twice in one object: keep one of them")
    return made
