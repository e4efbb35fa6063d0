"""Joins a running Ray or starts a local one that ends with us; knows no cluster and no worker."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import ray

from rl_core.cluster import guard

MARKER = "RLCORE_RAY"
_GIB = 2**30
_leases: _Runtime | None = None


class RayLease:
    """A claim on this process's Ray; the last one to be released stops a Ray that we started."""

    def __init__(self) -> None:
        self._runtime: _Runtime | None = _acquire()

    def release(self) -> None:
        """Gives the claim back. A second call does nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.release()


class _Runtime:
    """The Ray connection of this process."""

    def __init__(self) -> None:
        self.claims = 0
        self._ours = not ray.is_initialized()
        self._temp_dir: Path | None = None
        if self._ours:
            self._connect()
            atexit.register(self.stop)
        self.session = _session()

    def release(self) -> None:
        self.claims -= 1
        if self.claims == 0:
            self.stop()

    def stop(self) -> None:
        global _leases
        if _leases is self:
            _leases = None
        if not self._ours:
            return
        self._ours = False
        atexit.unregister(self.stop)
        if ray.is_initialized() and _session() == self.session:
            ray.shutdown()
        if self._temp_dir is not None:
            guard.sweep(MARKER, str(self._temp_dir))
            self._guard.terminate()
            self._guard.wait()
            shutil.rmtree(self._temp_dir, ignore_errors=True)  # a killed daemon may still write its last line

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # before `init`, which speaks before it looks at its argument
        address = os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, logging_level=logging.ERROR)
            return
        self._temp_dir = Path(tempfile.mkdtemp(prefix="rlcore-ray-"))
        self._guard = guard.start_guard(MARKER, str(self._temp_dir))
        # Ray's daemons inherit the mark, their workers from them; the driver's own later children must not.
        os.environ[MARKER] = str(self._temp_dir)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                _temp_dir=str(self._temp_dir),
                # Loopback: a laptop changes networks. Ray replaces 127.0.0.1 by the outer address, but not this one;
                # elsewhere than on Linux it takes 127.0.0.1 by itself.
                _node_ip_address="127.0.0.2" if sys.platform == "linux" else None,
                _system_config={
                    # Every actor of ours has an environment of its own, so that no prestarted worker is ever used.
                    "prestart_worker_first_driver": False,
                    "process_group_cleanup_enabled": True,
                },
            )
        finally:
            del os.environ[MARKER]


def _acquire() -> _Runtime:
    global _leases
    if _leases is None or not ray.is_initialized() or _session() != _leases.session:
        _leases = _Runtime()
    _leases.claims += 1
    return _leases


def _session() -> str:
    """Which Ray this process is connected to, so that one that the user has stopped is not mistaken for the next."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def _object_store_bytes() -> int:
    """A fifth of the memory, at most 4 GiB and four fifths of what /dev/shm has left; never under Ray's minimum."""
    limits = [4 * _GIB, psutil.virtual_memory().total // 5]
    if os.path.isdir("/dev/shm"):
        limits.append(shutil.disk_usage("/dev/shm").free * 4 // 5)
    return int(max(min(limits), 80 * 2**20))
