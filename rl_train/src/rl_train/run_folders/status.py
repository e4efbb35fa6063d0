"""Writes the state of a run to status.json in its folder, for other processes. Does not include steps or metrics."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import RLCoreError, UserError
from rl_train.errors import RunInterrupted, StopReason
from rl_train.files import write_atomically

STATUS = "status.json"
BUILDING = "building"
_BLOCK = 4096
"""Block size of file systems, in bytes. A file that is not empty can hold this much even on a full disk."""
_log = logging.getLogger("rlcore")


class Status:
    """status.json of a run in this process, from the start of the build to the end.

    Entering the context writes `building`, `running()` writes `running`, and leaving it writes how the run ended: finished,
    interrupted by a signal or the time limit, or failed with an error, and in which phase. Writes are
    atomic.

    A resume writes nothing before `building()`, because a rejected resume must not change the status of the run. Neither
    must a user error that is found before the first step.

    Args:
        folder: the run folder, locked by this process.
        since: start of the run, by `time.perf_counter`.
        resumes: whether a run in this folder is resumed.
        redact: removes secrets from an error message.
    """

    def __init__(
        self, folder: Path, *, since: float, resumes: bool = False, redact: Callable[[str], str] = lambda text: text
    ) -> None:
        self._redact = redact
        self._folder = folder
        self._since = since
        self._resumes = resumes
        self._before: bytes | None = None
        self._written = False
        self._started = _now() - datetime.timedelta(seconds=time.perf_counter() - since)
        self._phase: Callable[[], str | None] = lambda: BUILDING
        self._components: Mapping[str, object] = {}
        self._steps: int | None = None
        self._stopped: str | None = None
        self._workers: Mapping[str, list[int]] | None = None

    def __enter__(self) -> Self:
        if self._resumes:
            with suppress(FileNotFoundError):
                self._before = (self._folder / STATUS).read_bytes()
        else:
            self.building()
        return self

    def building(self, planned_steps: int | None = None) -> None:
        """Report that the run is being built; for a resumed run, call it once the resume is accepted.

        Args:
            planned_steps: total number of steps, if it may differ from that in the folder's config, which is written later.
        """
        self._write(BUILDING, pid=os.getpid(), planned_steps=planned_steps)

    def set_workers(self, components: Mapping[str, object], *, phase: Callable[[], str | None], steps: int) -> None:
        """Set the workers whose processes are reported, once the run is built.

        Args:
            components: policy, engine and companion models by name; their process ids are reported.
            phase: returns the current phase; None between two phases.
            steps: total number of steps.
        """
        self._components, self._phase, self._steps = components, phase, steps

    def stopped(self, step: int, reason: str) -> None:
        """Report that a control has ended the run after this step, before its last one."""
        self._steps, self._stopped = step, reason

    def running(self) -> None:
        """Report that the run is training, with its process ids; call it again when workers may have been replaced."""
        workers = {
            name: component.group.pids() for name, component in self._components.items() if isinstance(component, WorkerFacade)
        }
        if workers != self._workers:
            self._write("running", pid=os.getpid(), workers=workers)
            self._workers = workers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._resumes and not self._written:
            return
        if isinstance(error, UserError) and self._before is not None and self._phase() == BUILDING:
            self._replace(self._before)
        elif error is None:
            self._ended("finished", steps=self._steps, stopped=self._stopped)
        elif isinstance(error, KeyboardInterrupt | RunInterrupted):
            reason = error.reason if isinstance(error, RunInterrupted) else StopReason.CTRL_C
            self._ended("interrupted", during=self._phase(), reason=reason.label, error=str(error))
        else:
            message = str(error) if isinstance(error, RLCoreError) else f"{type(error).__name__}: {error}"
            self._ended("failed", during=self._phase(), error=self._redact(message))

    def _ended(self, state: Literal["finished", "interrupted", "failed"], **facts: Any) -> None:
        seconds = round(time.perf_counter() - self._since, 1)
        self._write(state, ended=_now().isoformat(timespec="seconds"), seconds=seconds, **facts)

    def _write(self, state: str, **facts: Any) -> None:
        started = self._started.isoformat(timespec="seconds")
        known_facts = {name: fact for name, fact in facts.items() if fact is not None}
        content = {"state": state, "started": started, "host": socket.gethostname(), **known_facts}
        self._replace(json.dumps(content, indent=1).encode())

    def _replace(self, content: bytes) -> None:
        try:
            write_atomically(self._folder / STATUS, content)
        except OSError:
            # The disk may be full. The existing file already has its own block.
            self._overwrite(content)
        self._written = True

    def _overwrite(self, content: bytes) -> None:
        if len(content) > _BLOCK:
            facts = json.loads(content)
            content = json.dumps({**facts, "error": str(facts.get("error"))[: _BLOCK // 4]}, indent=1).encode()
        try:
            with (self._folder / STATUS).open("r+b") as file:
                file.write(content)
                file.truncate()
        except OSError as error:
            if self._folder.is_dir():  # otherwise it was deleted, which the error of the run says
                _log.warning("%s could not be written: %s", self._folder / STATUS, error)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
