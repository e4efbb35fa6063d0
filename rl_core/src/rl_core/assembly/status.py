"""How a run stands, in status.json of its folder, for whoever looks from outside; it knows no step and no metric."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_core.dispatch.generation import DistributedGeneration
from rl_core.dispatch.policy import DistributedPolicy

STATUS = "status.json"


class Status:
    """status.json of one process's run; each writing replaces the file at once.

    Args:
        folder: the run folder.
        parts: the policy and the engine by name; of those that have workers, the processes are written down.
        since: when the run began, by `time.perf_counter`.
    """

    def __init__(self, folder: Path, *, parts: Mapping[str, object], since: float) -> None:
        self._folder = folder
        self._parts = parts
        self._since = since
        self._started = _now() - datetime.timedelta(seconds=time.perf_counter() - since)
        self._workers: Mapping[str, list[int]] | None = None

    def running(self) -> None:
        """Say that the run goes on, and by which processes; call it again where workers may have been replaced."""
        workers = {
            name: part.group.pids()
            for name, part in self._parts.items()
            if isinstance(part, DistributedPolicy | DistributedGeneration)
        }
        if workers != self._workers:
            self._write("running", pid=os.getpid(), workers=workers)
            self._workers = workers

    def ended(self, state: Literal["finished", "interrupted", "failed"], **facts: Any) -> None:
        """Say how the run ended, when, and after how many seconds.

        Args:
            state: how.
            facts: what else is known of it; JSON values.
        """
        seconds = round(time.perf_counter() - self._since, 1)
        self._write(state, ended=_now().isoformat(timespec="seconds"), seconds=seconds, **facts)

    def _write(self, state: str, **facts: Any) -> None:
        content = {"state": state, "started": self._started.isoformat(timespec="seconds"), **facts}
        partial = self._folder / f"{STATUS}.tmp"
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(partial, self._folder / STATUS)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
