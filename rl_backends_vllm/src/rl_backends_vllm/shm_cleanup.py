"""What vLLM and Intel's OpenMP runtime leave in shared memory and in files, and how it goes; knows no engine.

A name in shared memory serves only to meet: once all have met it is taken away, those who have mapped the memory keep it, and
nothing is left of a process that is killed. So goes the memory of the queues between the processes of a replica, that of tensor
parallel groups on a CPU, which nobody takes away, and the page by which the OpenMP runtime registers a process. Sockets and the
file by which process groups meet are needed as long as a replica runs; they lie in a folder of the process that holds it. What
is killed before it could do any of this is swept by the next replica that starts, and by the end of its own engine.
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
from contextlib import contextmanager
from functools import cache
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path

import psutil

_SHM = Path("/dev/shm")
_OPENMP_PAGE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")
_GROUP_MEMORY = re.compile(r"(/dev/shm/vllm_dist_\S+-cpushm_\d+)$", flags=re.MULTILINE)
_QUEUES = "/dev/shm/psm_"
_PREFIX = "rlcore-vllm-"
_FOLDER = re.compile(rf"{_PREFIX}(\d+)-\w+")
_MAX_FOLDER_LENGTH = 70
"""A Unix socket's path has at most 107 characters, and the names of vLLM's have 36."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_OWN_PROCESSES = ("VllmWorker", "EngineCore")
"""How vLLM names its processes."""


def unlink_shared_memory() -> None:
    """Take the names away from the shared memory that this process has met others by."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text() if maps.exists() else ""
    for path in set(_GROUP_MEMORY.findall(mapped)):
        Path(path).unlink(missing_ok=True)
    if _QUEUES in mapped:
        _unlink_own_queues()
    _unlink_own_semaphores()
    unlink_openmp_page()


def unlink_openmp_page(folder: Path = _SHM) -> None:
    """Take this process's OpenMP page away: it warns of a second runtime in the process, which would have shown by now."""
    (folder / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)


def remove_stale_files(pages: Path = _SHM, temporary: Path | None = None) -> list[str]:
    """Remove the OpenMP pages and the folders of processes that are gone and were this user's; the names of those removed."""
    removed = []
    for path in [*pages.glob("__KMP_REGISTERED_LIB_*"), *(temporary or _temporary()).glob(f"{_PREFIX}*")]:
        named = _OPENMP_PAGE.fullmatch(path.name) or _FOLDER.fullmatch(path.name)
        if named is None or _is_running(int(named[1])):
            continue
        try:
            if path.stat().st_uid == os.getuid():
                _remove(path)
                removed.append(path.name)
        except FileNotFoundError:  # another worker's driver was faster
            continue
    return removed


@contextmanager
def replica_folder() -> Iterator[Path]:
    """The folder of this process's replica, named to vLLM while the block starts it; gone where the block fails.

    It has one name as long as the process lives, since vLLM reads the variable once.
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
    """Remove the folder of this process's replica, which has ended."""
    _remove(_folder_of(os.getpid()))


@contextmanager
def tempfiles_in_replica_folder() -> Iterator[None]:
    """Have temporary files that this process makes in the block lie in the folder of `replica_folder`."""
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(_SOCKETS, before)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _unlink_own_queues() -> None:
    """The creator of a queue unlinks it at a regular end, which must not fail because it is done already."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    # Those of a worker process are held by a frame of its main loop alone.
    for buffer in [found for found in gc.get_objects() if type(found) is ShmRingBuffer]:
        if buffer.is_creator:
            buffer.is_creator = False
            buffer.shared_memory.unlink()


def _unlink_own_semaphores() -> None:
    """Those of a process that vLLM has started, which hands none on; elsewhere they are somebody else's."""
    if not multiprocessing.current_process().name.startswith(_OWN_PROCESSES):
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
    # Its bars lock other processes out, by one semaphore more for the first bar of a process.
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


def _remove(path: Path) -> None:
    """Whatever is left of it; vLLM and other drivers take their part of it away at the same time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
