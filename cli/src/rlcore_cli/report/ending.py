"""The status of a run, from its status file and from whether its process is alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from rlcore_cli.report.run_folder import RunFolder
from rlcore_cli.report.scales import format_duration


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The status of a run.

    Attributes:
        state: `building`, `running`, `finished`, `interrupted`, `failed`, `vanished` (its process is gone) or
            `unknown`.
        sentence: The status in words.
        error: The error message of the run.
        times: Start, end and duration, as far as they are recorded.
        is_over: Whether the run has ended.
    """

    state: str
    sentence: str
    error: str | None = None
    times: str = ""
    is_over: bool = True


def ending_of(run: RunFolder) -> Ending:
    """The status of a run from status.json; its process is checked only on the machine where it ran."""
    return replace(_ending(run), times=_times(run))


def _ending(run: RunFolder) -> Ending:
    status = run.status or {}
    state = status.get("state")
    done, planned = run.last_step or 0, run.planned_steps
    so_far = f"{done} of {planned} steps" if planned is not None else f"{done} steps"
    during = _during(status.get("during"))
    error = str(status["error"]) if status.get("error") else None
    match state:
        case "finished":
            return Ending(state=state, sentence=f"Finished: {so_far}.")
        case "interrupted":
            return Ending(state=state, sentence=f"Interrupted{during} after {so_far}.", error=error)
        case "failed":
            return Ending(state=state, sentence=f"Failed{during} after {so_far}.", error=error)
        case "building" | "running" if _is_gone(run, status.get("pid")):
            sentence = (
                f"Exited without an error message after {so_far}: process {status['pid']} is gone. It was killed (out of "
                "memory?) or the machine went down."
            )
            return Ending(state="vanished", sentence=sentence)
        case "building":
            return Ending(state=state, sentence=f"Starting: {so_far} so far.", is_over=False)
        case "running":
            return Ending(state=state, sentence=f"Running: {so_far} so far.", is_over=False)
        case _:
            return Ending(state="unknown", sentence=f"{so_far.capitalize()}; the run folder has no valid status.")


def _during(phase: object) -> str:
    if not phase:
        return ""
    return " during startup," if phase == "building" else f" in phase {phase},"


def _times(run: RunFolder) -> str:
    """Start, end and duration; for a resumed run, those of its latest process."""
    status = run.status or {}
    started = status.get("started") or (run.environment or {}).get("started")
    if not started:
        return ""
    ended, seconds = status.get("ended"), status.get("seconds")
    end = f", ended {_moment(ended)}" if ended else ""
    took = f", took {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"Started {_moment(started)}{end}{took}."


def _moment(text: object) -> str:
    return str(text).replace("T", " ").replace("+00:00", " UTC")


def _is_gone(run: RunFolder, pid: object) -> bool:
    # While a run is being resumed, environment.json still describes the previous process.
    host = (run.status or {}).get("host") or (run.environment or {}).get("host")
    if not isinstance(pid, int) or host != socket.gethostname():
        return False
    if Path("/proc").is_dir():
        return not Path(f"/proc/{pid}").exists()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
