"""Joins a running Ray, or starts a local one that ends with this process."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray.job_config import JobConfig

from rl_core.cluster import daemons, orphan_reaper, placement
from rl_core.cluster.ray_internals import node, ray_constants, services, state, utils
from rl_core.errors import RayDiedError, UserError
from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_core.rendezvous import interfaces

_log = logging.getLogger(__name__)

MARKER = "RLCORE_RAY"
_GIB = 2**30
_leases: _Runtime | None = None


class RayLease:
    """A lease on this process's Ray; releasing the last one stops a Ray that we started."""

    def __init__(self) -> None:
        global _leases
        if _leases is None or not ray.is_initialized() or _session() != _leases.session:
            _leases = _Runtime()
        _leases.claims += 1
        self._runtime: _Runtime | None = _leases

    is_connected = staticmethod(ray.is_initialized)

    def release(self) -> None:
        """Release the lease. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.claims -= 1
            if runtime.claims == 0:
                runtime.stop()


class _Runtime:
    """The Ray connection of this process."""

    def __init__(self) -> None:
        self.claims = 0
        self._ours = not ray.is_initialized()
        self._stopped = False
        self._temp_dir: Path | None = None
        if self._ours:
            with _signal_handlers_kept():
                self._connect()
            atexit.register(self.stop)
        self.session = _session()
        self._watch = daemons.DaemonWatch()

    def stop(self) -> None:
        global _leases
        _leases = None if _leases is self else _leases
        if self._stopped:
            return
        self._stopped = True
        died = daemons.is_dead()
        self._watch.stop()
        if not self._ours:
            return
        atexit.unregister(self.stop)
        if died:
            # Ray's own shutdown would wait for the daemon, and its C++ threads crash a process that exits without it.
            atexit.register(_exit_without_ray)
        elif ray.is_initialized() and _session() == self.session:
            ray.shutdown()
        self._remove_local()

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # before `init`, which logs before it applies its argument
        address, job = os.environ.get("RAY_ADDRESS"), JobConfig(_py_driver_sys_path=list(MODULE_FOLDERS))
        if address:
            refuse_silent_port(address)
            try:
                ray.init(address=address, job_config=job, logging_level=logging.ERROR)
            except (ConnectionError, ray.exceptions.AuthenticationError) as error:
                raise UserError(f"RAY_ADDRESS={address}: {error}. To find the cause: rlcore doctor --cluster") from error
            return
        for is_last in (False, True):
            # Readable only by this user. Ray makes the folder that it is given world-readable, so it gets one inside.
            self._temp_dir = folder = Path(tempfile.mkdtemp(prefix="rlcore-ray-"))
            try:
                return self._start_local(folder, job)
            except Exception as error:  # at its own limits, Ray raises plain exceptions
                text = f"{error}{daemons.last_errors(folder.glob('ray/session_latest/logs/*.err'))}"
                ray.shutdown()
                self._remove_local()
                if is_last:
                    raise RayDiedError(f"Ray did not start in two attempts: {text}\n{_busy_machine()}") from error
                _log.warning("Ray did not start, and is started once more. The reason: %s", text)

    def _start_local(self, folder: Path, job: JobConfig) -> None:
        self._guard = orphan_reaper.start_reaper(MARKER, str(folder), folder=str(folder))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        with _daemons_as_needed(marker=str(folder)):
            ray.init(
                address="local",
                job_config=job,
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                _temp_dir=str(folder / "ray"),
                _node_ip_address=interfaces.LOOPBACK,
                _system_config={
                    "prestart_worker_first_driver": False,  # never used: every actor has its own runtime environment
                    "task_events_report_interval_ms": 0,  # otherwise its GCS server keeps 4 KB for each of 100,000 calls
                    "process_group_cleanup_enabled": True,
                },
            )

    def _remove_local(self) -> None:
        if self._temp_dir is not None:
            orphan_reaper.sweep(MARKER, str(self._temp_dir))
            self._guard.kill()  # also ends it if it is stopped
            self._guard.wait()
            shutil.rmtree(self._temp_dir, ignore_errors=True)  # a killed daemon may still write a last line


def refuse_silent_port(address: str) -> None:
    """Raise a UserError if nothing listens at the address of a Ray cluster, which Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():  # unlike `auto`
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise UserError(
                f"Nothing answers at RAY_ADDRESS={address} ({error}). Check that `ray start --head --port={port}` runs there, "
                "and that no firewall blocks the port."
            ) from error


def _busy_machine() -> str:
    load, free = os.getloadavg()[0], psutil.virtual_memory().available / _GIB
    return (
        f"Ray waits 30 s for its GCS server and its raylet. This machine has {os.cpu_count()} CPUs with a load of {load:.1f}, "
        f"and {free:.1f} GiB of free memory. End other processes and run the same command again, or start Ray "
        "before the run (`ray start --head`) and set RAY_ADDRESS."
    )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep our own handlers from Ray's, which exits with code 15, and its C++ code's, which prints a stack and aborts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    own = {number: by for number, by in before.items() if callable(by) and not isinstance(by, signal.Handlers)}
    rays = (lambda _: None) if signal.SIGTERM in own else utils.set_sigterm_handler
    try:
        with patch.object(utils, "set_sigterm_handler", rays):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in own.items():
                signal.signal(number, handler)


@contextmanager
def _daemons_as_needed(marker: str) -> Iterator[None]:
    """Give the daemons that Ray starts in the block, and their workers, what no argument of Ray sets.

    - The marker; later children of the driver must not have it.
    - They listen only on 127.0.0.1. On Linux, Ray replaces this address of a node with an external one, unless a switch, meant
      for other systems, is off; daemons and workers read its variable as well.
    - Niceness 0, because Ray's own 15 lets Linux run the threads of a worker on one core while another is idle.
    - A new session, so that signals to our process group, by `timeout` or a closing terminal, do not end them before
      the run. On systems other than Linux, Ray needs them in our group, to end them with us.
    - Neither autoscaler nor dashboard, which take two CPU-seconds and 100 MB; a release with other method names starts both.
    """
    niceness = ray_constants.RAY_WORKER_NICENESS
    variables = {MARKER: marker, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", niceness: os.environ.get(niceness, "0")}
    popen, own_session = services.ConsolePopen, sys.platform == "linux"

    def start(command: Any, *, env: dict[str, str], **settings: Any) -> Any:
        return popen(command, env=env | variables, start_new_session=own_session, **settings)

    unused: dict[str, Any] = dict.fromkeys(("start_monitor", "start_api_server"), lambda *_, **__: None)
    not_started = patch.multiple(node.Node, create=True, **unused)
    with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False), patch.object(services, "ConsolePopen", start), not_started:
        yield


def _exit_without_ray() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    os._exit(1)


def _session() -> str:
    """Identifies the Ray that this process is connected to, so that one that the user has stopped is not reused."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


def _object_store_bytes() -> int:
    """A fifth of the memory, at most 4 GiB and four fifths of the free space in /dev/shm; at least Ray's minimum."""
    limits = [4 * _GIB, psutil.virtual_memory().total // 5]
    if os.path.isdir("/dev/shm"):
        limits.append(shutil.disk_usage("/dev/shm").free * 4 // 5)
    return int(max(min(limits), 80 * 2**20))


def live_nodes() -> list[placement.Node]:
    """The live nodes, the driver's own first."""
    free: dict[str, dict[str, Any]] = state.available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        placement.Node(
            node_id=row["NodeID"],
            address=row["NodeManagerAddress"],
            cpus=row["Resources"].get("CPU", 0.0),
            gpus=row["Resources"].get("GPU", 0.0),
            free_cpus=free.get(row["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(row["NodeID"], {}).get("GPU", 0.0),
        )
        for row in ray.nodes()
        if row["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.node_id != here)
