"""Cleans up shared memory and files created by vLLM and by Intel's OpenMP runtime.

A shared memory segment needs a name only until all processes have opened it. Its name is then unlinked, so that nothing remains
if a process is killed: this covers the message queues of a replica, the memory of tensor parallel groups on a CPU, which vLLM
never unlinks, and the page with which the OpenMP runtime registers a process. Sockets and the rendezvous file of process groups
are needed as long as the replica runs, and are kept in a folder per process. Folders of killed processes are removed when the
next replica starts and when an engine shuts down.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path

import psutil

_GROUP_MEMORY = re.compile(r"(/dev/shm/vllm_dist_\S+-cpushm_\d+)$", flags=re.MULTILINE)
_QUEUES = "/dev/shm/psm_"
_PREFIX = "rlcore-vllm-"
_FOLDER = re.compile(rf"{_PREFIX}(\d+)-\w+")
_MAX_FOLDER_LENGTH = 70
"""The path of a Unix socket has at most 107 characters, and vLLM's file names have 36."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_OWN_PROCESSES = ("VllmWorker", "EngineCore")
"""Name prefixes of vLLM's processes."""


def unlink_shared_memory() -> None:
    """Unlink the names of shared memory that this process has opened."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text() if maps.exists() else ""
    for path in set(_GROUP_MEMORY.findall(mapped)):
        Path(path).unlink(missing_ok=True)
    if _QUEUES in mapped:
        _unlink_own_queues()
    _unlink_own_semaphores()
    unlink_openmp_page()


def unlink_openmp_page() -> None:
    """Unlink this process's OpenMP page, which detects a second runtime in the process; that would have happened by now."""
    Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)


def remove_stale_folders(temporary: Path | None = None) -> None:
    """Remove the folders of this user's replicas whose processes have exited."""
    for path in (temporary or _temporary()).glob(f"{_PREFIX}*"):
        match = _FOLDER.fullmatch(path.name)
        if match is None or _is_running(int(match[1])):
            continue
        with suppress(FileNotFoundError):  # removed by another driver meanwhile
            if path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replica_folder() -> Iterator[Path]:
    """Create the folder of this process's replica and pass it to vLLM while the block runs; removed if the block fails.

    Its name is constant for the process, because vLLM reads the variable only once.
    """
    folder = _folder_of(os.getpid())
    folder.mkdir(mode=0o700, exist_ok=True)
    before = os.environ.get(_SOCKETS)
    os.environ[_SOCKETS] = str(folder)
    try:
        yield folder
    except BaseException:
        remove_replica_folder()
        raise
    finally:
        if before is None:
            del os.environ[_SOCKETS]
        else:
            os.environ[_SOCKETS] = before


def remove_replica_folder() -> None:
    """Remove the folder of this process's replica after shutdown."""
    shutil.rmtree(_folder_of(os.getpid()), ignore_errors=True)


@contextmanager
def tempfiles_in_replica_folder() -> Iterator[None]:
    """Create temporary files of the block in the folder of `replica_folder`."""
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(_SOCKETS, before)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _unlink_own_queues() -> None:
    """The creator of a queue would unlink it again at shutdown, which must not fail."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    # In a worker process, only a frame of its main loop references them.
    for buffer in [found for found in gc.get_objects() if type(found) is ShmRingBuffer]:
        if buffer.is_creator:
            buffer.is_creator = False
            buffer.shared_memory.unlink()


def _unlink_own_semaphores() -> None:
    """Only in processes started by vLLM, which pass no semaphores on; elsewhere they may belong to others."""
    if not multiprocessing.current_process().name.startswith(_OWN_PROCESSES):
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
    # The first progress bar of a process would create another semaphore as a lock between processes.
    tqdm.set_lock(threading.RLock())


@cache
def _folder_of(pid: int) -> Path:
    return _temporary() / f"{_PREFIX}{pid}-{os.urandom(4).hex()}"


def _temporary() -> Path:
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual / f"{_PREFIX}{2**22}-{0:08x}")) <= _MAX_FOLDER_LENGTH else Path("/tmp")


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
