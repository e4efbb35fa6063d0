"""How a run stands or ended, from its status file and from whether its process lives; it knows no page."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from rlcore_cli.report.run_folder import RunFolder
from rlcore_cli.report.scales import format_duration


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run stands.

    Attributes:
        state: `building`, `running`, `finished`, `interrupted`, `failed`, `vanished` (its process is gone without a word) or
            `unknown`.
        sentence: The same for a person.
        error: What it ended with, in the run's own words.
        times: When it started and ended, and how long it took, as far as the folder says.
        is_over: Whether nothing more will be written.
    """

    state: str
    sentence: str
    error: str | None = None
    times: str = ""
    is_over: bool = True


def ending_of(run: RunFolder) -> Ending:
    """How a run stands, from status.json; a process can be looked for on its own machine only."""
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
                f"Ended after {so_far} without a word: its process {status['pid']} is gone. Killed (out of memory?), or "
                "the machine went down."
            )
            return Ending(state="vanished", sentence=sentence)
        case "building":
            return Ending(state=state, sentence=f"Being built: {so_far} so far.", is_over=False)
        case "running":
            return Ending(state=state, sentence=f"Running: {so_far} so far.", is_over=False)
        case _:
            return Ending(state="unknown", sentence=f"{so_far.capitalize()}; the folder does not say how the run stands.")


def _during(phase: object) -> str:
    if not phase:
        return ""
    return " while it was being built," if phase == "building" else f" in the phase {phase},"


def _times(run: RunFolder) -> str:
    """Of a resumed run, those of its latest process."""
    status = run.status or {}
    started = status.get("started") or (run.environment or {}).get("started")
    if not started:
        return ""
    ended, seconds = status.get("ended"), status.get("seconds")
    end = f", ended {_moment(ended)}" if ended else ""
    took = f", after {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"Started {_moment(started)}{end}{took}."


def _moment(text: object) -> str:
    return str(text).replace("T", " ").replace("+00:00", " UTC")


def _is_gone(run: RunFolder, pid: object) -> bool:
    # While a run is resumed, environment.json still tells of the process before.
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
