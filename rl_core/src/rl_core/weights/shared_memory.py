"""Segments of shared memory for weights, which are cleaned up however their process ends.

A segment is a locked file in /dev/shm named `rlcore-<pid>-<n>`. The kernel releases the lock with the process, however it ends,
so a segment without a lock is orphaned and can be swept. The lock decides, not the pid, because containers that share /dev/shm
do not share pids. No resource tracker is used (Python's would unlink a segment once any process that had mapped it ends).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import weakref
from pathlib import Path

import torch

from rl_core.errors import WeightSyncError

DIRECTORY = Path("/dev/shm")
"""A tmpfs."""
PREFIX = "rlcore-"
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of Linux 5.14 and later: map all pages at once. One fault per page costs several times the copy itself."""
_numbers = itertools.count()
_MAPPED = 2
"""Number of segments that a receiver keeps mapped: those of a `BufferPair`."""


class Segment:
    """Memory that other processes of the node can map; unlinked when closed, collected, or when the process ends."""

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes at once, so that no later write can fail.

        Raises:
            WeightSyncError: `DIRECTORY` has too little space; nothing was written.
        """
        self.size = size
        sweep()
        if _free_bytes() < size:
            raise _too_small(size)
        self.path, descriptor = _create_locked()
        self._unlink = weakref.finalize(self, _unlink_and_unlock, self.path, descriptor, os.getpid())
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            self.close()
            if error.errno == errno.ENOSPC:
                raise _too_small(size) from error
            raise
        mapping = mmap.mmap(descriptor, max(size, 1))
        _populate(mapping, _POPULATE_WRITE)
        self.buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        """[size] uint8, shared with every process that maps it."""

    @property
    def name(self) -> str:
        """The argument of `map_segment`."""
        return self.path.name

    def close(self) -> None:
        """Unlink the segment; processes that have mapped it keep their mapping. Calling it twice is fine."""
        self._unlink()


class MappedSegments:
    """Segments of another process that stay mapped between buckets and refits, because mapping costs as much as a copy."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[int, torch.Tensor]] = {}
        """Name to inode and bytes; the most recently used last."""

    def map(self, name: str, *, size: int) -> torch.Tensor:
        """At least the first `size` bytes of a segment, as `map_segment`.

        Raises:
            WeightSyncError: there is no such segment on this node.
        """
        inode, segment = self._mapped.pop(name, (-1, None))
        if segment is None or segment.numel() < size or inode != self._inode(name):
            segment = map_segment(name)
            inode = self._inode(name)
        self._mapped[name] = inode, segment
        for oldest in list(self._mapped)[:-_MAPPED]:
            del self._mapped[oldest]
        return segment

    def _inode(self, name: str) -> int:
        """Tells a segment from an earlier one of the same name, whose process has ended; -1 if there is none."""
        try:
            return (DIRECTORY / name).stat().st_ino
        except FileNotFoundError:
            return -1


def map_segment(name: str) -> torch.Tensor:
    """The bytes of another process's segment, uint8; writing to them does not reach the owner.

    They stay mapped as long as a tensor over them exists.

    Raises:
        WeightSyncError: there is no such segment on this node.
    """
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightSyncError(
            f"The shared memory segment {name!r} is not on this node ({os.uname().nodename}): its owner has ended, or runs on "
            "another node. Across nodes, set policy.generation.refit_transport: collective."
        ) from None
    try:
        # A private mapping is writable without affecting the owner: torch wants writable memory, and pages stay shared.
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    _populate(mapping, _POPULATE_READ)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def sweep() -> list[str]:
    """Unlink the segments of processes that have ended and return their names; segments in use are kept."""
    removed = []
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # unlinked meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
    return removed


def _create_locked() -> tuple[Path, int]:
    while True:
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue  # an earlier process had this pid
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between the two calls a sweep may have removed the unlocked file as an orphan.
        if os.fstat(descriptor).st_nlink > 0:
            return path, descriptor
        os.close(descriptor)


def _unlink_and_unlock(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the segment belongs to its parent
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _populate(mapping: mmap.mmap, advice: int) -> None:
    """Map all pages now; older kernels map them one by one on access."""
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _free_bytes() -> int:
    space = os.statvfs(DIRECTORY)
    return space.f_bavail * space.f_frsize


def _too_small(size: int) -> WeightSyncError:
    return WeightSyncError(
        f"A bucket of weights needs {size / 2**20:.1f} MiB of shared memory, but {DIRECTORY} has only "
        f"{_free_bytes() / 2**20:.1f} MiB left. Make it larger (containers: --shm-size=4g), lower "
        "policy.generation.refit_buffer_mib, or set policy.generation.refit_transport: collective."
    )
