"""Writes metrics.jsonl and rollouts as JSON lines to the run folder; other tools read these files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rl_core.errors import DataError
from rl_train.files import write_atomically
from rl_train.metrics.logger import Logger, Timeline

METRICS = "metrics.jsonl"
"""In the run folder: one object per step."""
TIMELINE = "timeline.jsonl"
"""In the run folder: one object per step, see `Timeline`."""
TOKEN_TEXTS = "token_texts.jsonl"
"""In the rollout folder: one object per token id, `id` and `text`; partial characters are U+FFFD."""


class JsonlLogger(Logger):
    """Appends to files under a run folder; every line is synced to disk before the next step starts.

    Args:
        folder: the run folder.
        resume_from: delete entries of later steps, which a resumed run repeats; None keeps all.
        token_text: returns the text of a token id; each id in the rollouts is written once.
    """

    def __init__(self, folder: Path, *, resume_from: int | None = None, token_text: Callable[[int], str] | None = None) -> None:
        self._folder = folder
        self._metrics = folder / METRICS
        self._timeline = folder / TIMELINE
        self._rollouts = folder / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        self._token_text = token_text
        self._token_texts = self._rollouts / TOKEN_TEXTS
        for path in (self._metrics, self._timeline, self._token_texts):
            _remove_incomplete_line(path)
        self._known_tokens = {row["id"] for row in read_jsonl(self._token_texts)}
        if resume_from is not None:
            self._delete_after(resume_from)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; NaN and infinity are written as null."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._metrics, [{"step": step, **clean}])

    def log_timeline(self, timeline: Timeline, step: int) -> None:
        """Append one line, rounded to milliseconds and hundredths of a rollout."""
        phases = [[name, round(start, 3), round(end, 3)] for name, start, end in timeline.phases]
        waiting = {place: [round(count, 2) for count in counts] for place, counts in timeline.waiting.items()}
        line = {"step": step, "seconds": round(timeline.seconds, 3), "phases": phases, "waiting": waiting}
        _append(self._timeline, [line])

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rollouts/step_NNNNNN.jsonl, and the texts of new tokens to rollouts/token_texts.jsonl."""
        path = self._rollouts / f"step_{step:06d}.jsonl"
        path.unlink(missing_ok=True)
        _append(path, rows)
        if self._token_text is not None:
            new = sorted({token for row in rows for token in row.get("tokens", ())} - self._known_tokens)
            _append(self._token_texts, [{"id": token, "text": self._token_text(token)} for token in new])
            self._known_tokens.update(new)

    def _delete_after(self, step: int) -> None:
        for path in self._rollouts.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()
        for path in (self._metrics, self._timeline):
            if path.exists():
                write_atomically(path, _encoded([line for line in read_jsonl(path) if line["step"] <= step]))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """As `iter_jsonl`, all at once."""
    return list(iter_jsonl(path))


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file, if it exists. NaN and infinite values are read as None.

    A last line without a newline is incomplete and is skipped.

    Raises:
        DataError: A line is not a JSON object.
    """
    if path.exists():
        with path.open("rb") as file:  # an incomplete line may end within a character
            yield from (row for _, row in _complete_rows(path, file))


class JsonlTail:
    """Reads a JSON-lines file to which another process appends, each line once.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._end = self._lines = 0

    def read(self) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        """The numbers and objects of new lines, and whether they replace all earlier ones.

        A file that was replaced, shortened or deleted is read from the start: a resumed run deletes entries of later steps.

        Raises:
            DataError: A line is not a JSON object; the next call reads it again.
        """
        if not self._path.exists():
            return [], self._restart(None)
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            restarted = self._restart(identity) if identity != self._file or status.st_size < self._end else False
            file.seek(self._end)
            rows = list(_complete_rows(self._path, file, lines_before=self._lines))
            self._end, self._lines = file.tell(), self._lines + len(rows)
            return rows, restarted

    def _restart(self, identity: tuple[int, int] | None) -> bool:
        had_lines = self._lines > 0
        self._file, self._end, self._lines = identity, 0, 0
        return had_lines


def _complete_rows(path: Path, file: BinaryIO, *, lines_before: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and object of each complete line; the file is left after the last one."""
    number = lines_before
    while (line := file.readline()).endswith(b"\n"):
        number += 1
        try:
            row = json.loads(line, parse_constant=_not_finite)
        except ValueError as error:
            raise DataError(f"{path}:{number}: invalid JSON: {error}. Remove this line to continue without it.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: must be a JSON object, found {str(row)[:80]}.")
        yield number, row
    file.seek(-len(line), os.SEEK_CUR)


def _remove_incomplete_line(path: Path) -> None:
    """Remove the end of a line that a killed process or a full disk left behind: the next line would be appended to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write(_encoded(rows))
        file.flush()
        os.fsync(file.fileno())


def _encoded(rows: Sequence[Mapping[str, Any]]) -> bytes:
    # An unpaired surrogate, for example in the text of an error, is written as the escape that JSON has for it.
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="backslashreplace")


def _not_finite(name: str) -> None:
    """None for NaN and Infinity, which Python writes although JSON does not allow them."""
