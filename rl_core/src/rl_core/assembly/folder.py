"""Run folders: which one a run writes to, and which checkpoint it goes on from."""

from __future__ import annotations

import fcntl
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl_core.assembly.status import BUILDING, STATUS
from rl_core.checkpoints.state import read_state
from rl_core.checkpoints.store import CheckpointStore
from rl_core.config.schema import RunConfig
from rl_core.errors import CheckpointError, UserError


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    folder: Path
    """The run folder."""
    checkpoint: Path | None
    """What it goes on from."""


def choose_start(config: RunConfig, *, name: str, resume: str) -> Start:
    """The run folder and the checkpoint that `--resume` means.

    `auto` goes on with the newest run of this name that has a checkpoint and steps left, else begins a new one; `never`
    begins a new one; a path is a checkpoint, or a run folder whose newest checkpoint is meant.

    Args:
        config: the run.
        name: of the run folder; a new run beside an old one becomes `name-2`, `name-3`, ..., unless the old one ended
            before its first step.
        resume: `auto`, `never` or a path.

    Raises:
        CheckpointError: the path holds no complete checkpoint.
    """
    parent = Path(config.logger.log_dir)
    attempts = _attempts(parent, name)
    if resume == "auto":
        for folder in reversed(attempts):
            latest = _store(config, folder).latest()
            if latest is not None and int(latest.name.removeprefix("step_")) < config.algorithm.max_num_steps:
                return Start(folder=folder, checkpoint=latest)
            if latest is not None:
                break
        return Start(folder=_next_folder(parent, name, attempts), checkpoint=None)
    if resume == "never":
        return Start(folder=_next_folder(parent, name, attempts), checkpoint=None)
    return _at_path(Path(resume), config, parent, name, attempts)


def claim(folder: Path, exits: ExitStack) -> None:
    """Make the folder and hold it for this process.

    Raises:
        UserError: another process writes to it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock: IO[str] = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be made: {error.strerror}. Name another place with logger.log_dir=FOLDER."
        ) from error
    exits.callback(lock.close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"Another process is writing to {folder}. Wait for it, or begin a run of its own with --resume never."
        ) from error


def _at_path(path: Path, config: RunConfig, parent: Path, name: str, attempts: list[Path]) -> Start:
    if (path / "checkpoints").is_dir():
        latest = CheckpointStore(path / "checkpoints").latest()
        if latest is None:
            raise CheckpointError(f"The run folder {path} holds no complete checkpoint. Start afresh with --resume never.")
        return Start(folder=path, checkpoint=latest)
    read_state(path)
    own_folder = path.parent.name == "checkpoints"
    folder = path.parent.parent if own_folder else _next_folder(parent, name, attempts)
    return Start(folder=folder, checkpoint=path)


def _store(config: RunConfig, folder: Path) -> CheckpointStore:
    elsewhere = config.checkpointing.checkpoint_dir
    return CheckpointStore(Path(elsewhere) if elsewhere else folder / "checkpoints")


def _attempts(parent: Path, name: str) -> list[Path]:
    """Folders of runs of this name, oldest first."""
    numbered: dict[int, Path] = {}
    for folder in parent.glob(f"{name}*"):
        rest = folder.name[len(name) :]
        if folder.is_dir() and (rest == "" or (rest[:1] == "-" and rest[1:].isdigit())):
            numbered[int(rest[1:] or 1)] = folder
    return [numbered[number] for number in sorted(numbered)]


def _came_to_nothing(folder: Path) -> bool:
    """Whether it is of an attempt that ended, by an error or Ctrl-C, before its first step: there is nothing to keep."""
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists():
        return False
    try:
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no run of this version, or another process writes to it: not ours to take
        return False
    return status.get("state") in ("failed", "interrupted") and status.get("during") == BUILDING


def _next_folder(parent: Path, name: str, attempts: list[Path]) -> Path:
    if not attempts:
        return parent / name
    if _came_to_nothing(attempts[-1]):
        return attempts[-1]
    last = attempts[-1].name[len(name) + 1 :]
    return parent / f"{name}-{int(last or 1) + 1}"
