"""Disks that are full or too small for checkpoints: recognized, reported before the first step, and explained afterwards."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rl_core.errors import CheckpointWriteError, DiskFullError, RLCoreError

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_WORDS: Final = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)")
"""As the errors of libraries that keep no number say it."""
_NEARLY_FULL: Final = 2**20
_log = logging.getLogger("rlcore")


def is_full_disk(error: BaseException | None) -> bool:
    """Whether a full disk or an exhausted quota is among the reasons of an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_error(error: Exception, *, step: int, folder: Path, latest: Path | None) -> CheckpointWriteError | None:
    """The explanation of a checkpoint that could not be written, or None if the error explains itself.

    Call it before the incomplete files are removed: some libraries do not say that the disk is full.

    Args:
        error: what was raised while it was written.
        step: of the checkpoint.
        folder: parent of the step folders.
        latest: the last complete checkpoint.
    """
    if is_full_disk(error) or (not _explained(error) and free_bytes(folder) < _NEARLY_FULL):
        reason = "the disk is full"
        fix = (
            "Free space on that disk, keep fewer checkpoints (checkpointing.keep_latest_k, keep_top_k), or write them to "
            "another disk (checkpointing.checkpoint_dir)"
        )
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
    """Bytes that this process may still write to the disk of a folder, which need not exist yet."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def check_disk_space(folder: Path, *, checkpoint_bytes: int, most_at_once: int) -> None:
    """Compare the free space with what the checkpoints of a run need at least.

    Args:
        folder: parent of the step folders.
        checkpoint_bytes: size of one checkpoint; a lower bound.
        most_at_once: how many more than now will be there at the same time, the one being written included.

    Raises:
        DiskFullError: not one checkpoint fits. If only later ones do not fit, that is a warning.
    """
    free = free_bytes(folder)
    what = f"{folder} has {_size(free)} free, and one checkpoint of this run takes at least {_size(checkpoint_bytes)}"
    fix = (
        "Free space, keep fewer checkpoints (checkpointing.keep_latest_k, keep_top_k), or write them to another disk "
        "(checkpointing.checkpoint_dir)."
    )
    if free < checkpoint_bytes:
        raise DiskFullError(f"{what}, so not one could be written. No step was taken. {fix}", exit_code=2)
    if free < checkpoint_bytes * most_at_once:
        _log.warning(
            "%s; %d more will be there at once (an old one is deleted only when the new one is complete). %s",
            what,
            most_at_once,
            fix,
        )


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Whatever fails in the block because the disk of the run folder is full is raised as `DiskFullError`."""
    try:
        yield
    except RLCoreError:
        raise
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise DiskFullError(
            f"The disk of the run folder {folder} is full ({_size(free_bytes(folder))} free): {error}. Free space on it, or "
            "write elsewhere (logger.log_dir, checkpointing.checkpoint_dir); then start the same command again: it continues "
            "from the last complete checkpoint."
        ) from error


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
