"""The page of a run that is rendered again when the run has new data."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from rl_core.errors import DataError, UserError
from rl_train.metrics.jsonl import METRICS, TIMELINE
from rl_train.metrics.progress import PROGRESS
from rlcore_cli.report.ending import Ending, ending_of
from rlcore_cli.report.page import Live, render_live
from rlcore_cli.report.rollouts import rollouts_of_step
from rlcore_cli.report.run_folder import CONFIG, STATUS, RunFolder, RunFolderReader, stamp_of

EVERY_S = 2.0
"""Interval at which a page asks for changes, in seconds."""
LOG = Path("logs", "driver.log")
LOG_BYTES = 32 * 2**10
"""How much of the end of the log is shown."""
ROLLOUT_BYTES = 2 * 2**20
"""Maximum size of the rollouts of a step."""
_CHANGING = (METRICS, TIMELINE, STATUS, CONFIG)
"""Files whose changes change the charts."""

Stamp = tuple[tuple[int, int, int] | None, ...]


class LivePage:
    """The page of a run and its state. Its methods may be called from several threads.

    Args:
        find: Returns the run folder, which may be another one in each call; None if there is none yet.
        waiting: What the page shows as long as there is none.
    """

    def __init__(self, find: Callable[[], Path | None], *, waiting: str) -> None:
        self._find, self._lock = find, threading.Lock()
        self._nothing = Ending(state="waiting", sentence=waiting, is_over=False)
        self._path: Path | None = None
        self._reader: RunFolderReader | None = None
        self._stamp: Stamp = ()
        self._version = 0
        self._page: tuple[int, bytes] = (-1, b"")
        self._run = RunFolder(path=Path(), metrics={})
        self._ending = self._nothing

    def page(self) -> bytes:
        """The page as HTML."""
        with self._lock:
            self._update()
            if self._page[0] != self._version:
                live = Live(run=str(self._path or ""), version=str(self._version), every_s=EVERY_S)
                self._page = (self._version, render_live(self._run, self._ending, live).encode())
            return self._page[1]

    def state(self) -> bytes:
        """The status of the run, its progress and the end of its log as JSON."""
        with self._lock:
            self._update()
            alive = self._path is not None and not self._ending.is_over
            return json.dumps(
                {
                    "run": str(self._path or ""),
                    "version": str(self._version),
                    "state": self._ending.state,
                    "sentence": f"{self._ending.sentence} {self._ending.times}".strip(),
                    "progress": _text(self._path / PROGRESS) if self._path is not None and alive else "",
                    "log": (_text(self._path / LOG) if self._path is not None else "") or "Nothing logged.",
                }
            ).encode()

    def rollouts(self, step: int) -> bytes | None:
        """The first rollouts of a step as JSON; None if it has none.

        Raises:
            DataError: The file of the step is corrupt.
        """
        with self._lock:
            self._update()
            if step not in self._run.rollouts or not self._run.rollouts[step].is_file():
                return None
            return rollouts_of_step(self._run, step, budget_bytes=ROLLOUT_BYTES).encode()

    def _update(self) -> None:
        """Read what is new. If the folder was deleted or a file is corrupt, the last contents stay, with a message."""
        path = self._find()
        if path is None and self._path is None:
            return
        if path is not None and path != self._path:
            self._path, self._reader = path, None
        assert self._path is not None
        stamp = tuple(stamp_of(self._path / name) for name in _CHANGING)
        run = self._run
        try:
            if self._reader is None or stamp != self._stamp:
                self._reader = self._reader or RunFolderReader(self._path)
                run = self._reader.read()
            ending = ending_of(run)
        except (DataError, UserError, FileNotFoundError) as error:
            gone = not self._path.is_dir()
            sentence = f"The run folder {self._path} does not exist any more." if gone else str(error)
            self._reader, ending = None, Ending(state="unreadable", sentence=sentence)
        if run is not self._run or ending != self._ending:
            self._version += 1
        self._run, self._ending, self._stamp = run, ending, stamp


def _text(path: Path) -> str:
    """The last complete lines of a text file; '' if it does not exist."""
    try:
        with path.open("rb") as file:
            skipped = file.seek(0, 2) - LOG_BYTES
            file.seek(max(skipped, 0))
            content = file.read()
    except FileNotFoundError:
        return ""
    if skipped > 0:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")
