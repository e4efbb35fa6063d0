"""Disks that are full or too small for checkpoints, and deleted run folders: recognized and explained."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rl_core.errors import CheckpointWriteError, RLCoreError
from rl_train.errors import DiskFullError
from rl_train.files import format_size

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_MESSAGES: Final = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)")
"""Messages of libraries that do not preserve the error number."""
_NEARLY_FULL: Final = 2**20
_FEWER_CHECKPOINTS: Final = (
    "keep fewer checkpoints (checkpointing.keep_latest_k, keep_top_k), or write them to another disk "
    "(checkpointing.checkpoint_dir)"
)
_log = logging.getLogger("rlcore")


def is_full_disk(error: BaseException | None) -> bool:
    """Whether a full disk or an exhausted quota is among the reasons of an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(words in str(error) for words in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_error(error: BaseException, *, step: int, folder: Path, latest: Path | None) -> CheckpointWriteError | None:
    """The error to raise if a checkpoint could not be written; None if the original error is clear enough.

    Call it before the incomplete files are removed: some libraries do not say that the disk is full.

    Args:
        error: what was raised while it was written.
        step: of the checkpoint.
        folder: parent of the step folders.
        latest: the last complete checkpoint.
    """
    if not isinstance(error, Exception):
        return None
    if is_full_disk(error) or (not _explained(error) and free_bytes(folder) < _NEARLY_FULL):
        reason = "the disk is full"
        fix = f"Free space on that disk, {_FEWER_CHECKPOINTS}"
    elif isinstance(error, OSError) and error.errno is not None:
        reason, fix = str(error), "Make the folder writable, or write to another one (checkpointing.checkpoint_dir)"
    else:
        return None
    last = f"The last complete checkpoint is {latest}." if latest is not None else "There is no earlier checkpoint."
    again = "the same command continues from it." if latest is not None else "start the same command again."
    kind = DiskFullError if reason == "the disk is full" else CheckpointWriteError
    return kind(
        f"The checkpoint of step {step} could not be written to {folder}: {reason}. Its incomplete files were removed. "
        f"{last} {fix}; then {again}"
    )


def _explained(error: Exception) -> bool:
    return isinstance(error, RLCoreError) and not isinstance(error, CheckpointWriteError) and error.__cause__ is None


def free_bytes(folder: Path) -> int:
    """Free bytes for this process on the disk of a folder, which may not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_disk_space(folder: Path, *, checkpoint_bytes: int, most_at_once: int) -> None:
    """Compare the free space with the minimum that the checkpoints of a run need.

    Args:
        folder: parent of the step folders.
        checkpoint_bytes: size of one checkpoint; a lower bound.
        most_at_once: number of additional checkpoints that will exist at the same time, including the one being written.

    Raises:
        DiskFullError: not one checkpoint fits. If only later ones do not fit, that is a warning.
    """
    free = free_bytes(folder)
    shortage = (
        f"{folder} has {format_size(free)} free, but one checkpoint of this run needs at least {format_size(checkpoint_bytes)}"
    )
    fix = f"Free space, {_FEWER_CHECKPOINTS}."
    if free < checkpoint_bytes:
        raise DiskFullError(f"{shortage}, so none can be written. Training was not started. {fix}", exit_code=2)
    if free < checkpoint_bytes * most_at_once:
        _log.warning(
            "%s; %d more will exist at once (an old one is only deleted when the new one is complete). %s",
            shortage,
            most_at_once,
            fix,
        )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Within the block, explain errors that a full disk of the run folder, or its deletion, caused.

    Raises:
        DiskFullError: the disk is full.
        RLCoreError: a file in the run folder could not be written because its folder does not exist any more.
    """
    try:
        yield
    except RLCoreError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and Path(error.filename or "").is_relative_to(folder):
            missing = Path(error.filename).parent
            while not missing.parent.exists():
                missing = missing.parent
            raise RLCoreError(
                f"{missing} was deleted during the run, so {error.filename} cannot be written. The same command continues from "
                "the last complete checkpoint; if that was deleted too, it starts a new run."
            ) from error
        if not is_full_disk(error):
            raise
        raise DiskFullError(
            f"The disk of the run folder {folder} is full ({format_size(free_bytes(folder))} free): {error}. Free space on it, "
            "or write elsewhere (logger.log_dir, checkpointing.checkpoint_dir); then start the same command again: it "
            "continues from the last complete checkpoint."
        ) from error
