"""Ownership of run and checkpoint folders: by a run (`run.json`), and by a process (`.lock`)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rl_core.errors import CheckpointError, UserError
from rl_train.atomic_writes import write_atomically
from rl_train.checkpoints.store import CheckpointStore

RUN = "run.json"
LOCK = ".lock"
_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Identity of a run, which is unchanged when the run is resumed or its folders are moved."""

    run_id: str
    """32 hexadecimal digits, generated when the run folder is created."""
    name: str
    """The run's name in its config, without the number of the run folder."""
    folder: str
    """Absolute path of the run folder."""

    @classmethod
    def new(cls, *, name: str, folder: Path) -> RunIdentity:
        """The identity of a run that starts now."""
        return cls(run_id=uuid.uuid4().hex, name=name, folder=str(folder.absolute()))


def read_identity(folder: Path) -> RunIdentity | None:
    """The run that a run folder or checkpoint folder belongs to; None if it has no run.json.

    Raises:
        CheckpointError: its run.json is damaged.
    """
    path = folder / RUN
    try:
        return RunIdentity(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so the run that {folder} belongs to is unknown. Restore the file, or delete it "
            "if the folder belongs to this run."
        ) from error


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Write run.json into `folder`; the file is complete or absent."""
    write_atomically(folder / RUN, json.dumps(asdict(identity), indent=1).encode())


def lock_folder(folder: Path, exits: ExitStack, *, setting: str) -> None:
    """Create `folder` and lock it for this process until `exits` closes or the process ends.

    Args:
        folder: a run folder or a checkpoint folder.
        exits: releases the lock.
        setting: the config key of the folder, for errors.

    Raises:
        UserError: another process has locked it, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Append mode keeps the owner's entry if locking fails.
        lock: IO[str] = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot create the folder {folder}: {error.strerror}. Choose another one with {setting}=FOLDER."
        ) from error
    exits.callback(lock.close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise UserError(
            f"{folder} is in use by {lock.read().strip() or 'another process'}. Wait until that run has ended, or choose "
            f"another folder with {setting}=FOLDER."
        ) from error
    except OSError as error:
        _log.warning(
            "%s is on a file system without file locks (%s): nothing prevents a second run from writing there at the same time",
            folder,
            error.strerror,
        )
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    lock.flush()


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a folder."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks
        return False
    return False


def refuse_foreign(store: CheckpointStore, identity: RunIdentity, *, continues: bool) -> None:
    """Reject a checkpoint folder with checkpoints of another run. Without any, its run ended before its first checkpoint.

    Args:
        store: the folder this run would write to.
        identity: identity of this run.
        continues: whether the run resumes from one of its checkpoints; then a folder without run.json is taken over.

    Raises:
        CheckpointError: it belongs to another run, or has checkpoints of an unknown one.
    """
    owner, steps = read_identity(store.folder), store.named_steps()
    if not steps or (owner is None and continues):
        return
    if owner is not None and owner.run_id == identity.run_id:
        return
    which = f"the run {owner.folder}" if owner is not None else "an unknown run (it has no run.json)"
    raise CheckpointError(
        f"The checkpoint folder {store.folder} belongs to {which} (steps {steps[0]} to {steps[-1]}). Two runs in one folder "
        "would delete and resume each other's checkpoints. Choose another one with checkpointing.checkpoint_dir=FOLDER, or "
        f"remove that key to use the run folder. To continue that run, use --resume {store.find(steps[-1])}."
    )
