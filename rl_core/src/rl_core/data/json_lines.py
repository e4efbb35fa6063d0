"""Files of JSON lines as rows, each with its line's number; knows no field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_core.data.strict_json import read_json
from rl_core.errors import DataError


class JsonLines:
    """The objects of a file, one a line; blank lines are none.

    Args:
        path: The file.

    Raises:
        DataError: There is no such file.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"dataset {path} does not exist: give the path of a file of JSON lines")
        self.name = str(path)
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        self._lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return parsed(self._lines[index][1])

    def place(self, index: int) -> str:
        """File and line, from 1."""
        return f"{self.name}:{self._lines[index][0]}"


def parsed(line: bytes) -> dict[str, Any]:
    """The JSON object that a line holds.

    Raises:
        DataError: It holds something else.
    """
    try:
        row = read_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"no UTF-8 ({error.reason} at byte {error.start + 1} of the line)") from error
    if not isinstance(row, dict):
        raise DataError(f"expected a JSON object, found a {type(row).__name__}")
    return row
