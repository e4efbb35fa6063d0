"""Files of JSON lines as sequences of records, read whole; a bad line is told by its number. Knows no field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from rl_core.data.dataset_config import OnBadRow
from rl_core.errors import DataError

RecordT = TypeVar("RecordT")


class JsonLines(Sequence[RecordT]):
    """The records that the lines of a file amount to.

    Args:
        path: The file.
        make: The records of one line's object; raises DataError where it is bad.
        on_bad_row: What becomes of a bad line.
        called: What a record is called in errors.

    Attributes:
        skipped: Bad lines left out, under `on_bad_row: skip`.

    Raises:
        DataError: The file is absent or has no good line, or a line is bad; names file and line.
    """

    def __init__(
        self, path: Path, make: Callable[[dict[str, Any]], Iterable[RecordT]], *, on_bad_row: OnBadRow, called: str
    ) -> None:
        self.skipped = 0
        self._records = list(self._read(path, make, on_bad_row))
        if not self._records:
            raise DataError(f"{path} has no {called} to train on ({self.skipped} bad rows skipped)")

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> RecordT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordT]: ...

    def __getitem__(self, index: int | slice) -> RecordT | list[RecordT]:
        return self._records[index]

    def _read(self, path: Path, make: Callable[[dict[str, Any]], Iterable[RecordT]], on_bad_row: OnBadRow) -> Iterator[RecordT]:
        if not path.is_file():
            raise DataError(f"dataset {path} does not exist: give the path of a file of JSON lines")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield from make(parsed(line))
                except DataError as error:
                    if on_bad_row is OnBadRow.ERROR:
                        raise DataError(f"{path}:{number}: {error}") from error
                    self.skipped += 1


def parsed(line: str) -> dict[str, Any]:
    """The JSON object that a line holds.

    Raises:
        DataError: It holds something else.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"no JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise DataError(f"expected a JSON object, found a {type(row).__name__}")
    return row
