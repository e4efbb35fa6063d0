"""Processes of Ray on this machine that do not answer: daemons that died, and the Python stacks of workers.

Without raylet or GCS server, Ray does not respond: calls block, and after 14 to 60 s Ray's C++ code ends the process. A thread
sleeps on the daemons' process descriptors until one exits; every wait in this package checks once a second whether it has.

A worker registers `faulthandler` on a signal, with output to an unlinked file; another process on the same host sends the
signal and reads the file through /proc. The handler is C code that needs neither a free thread nor the interpreter lock, so a
worker stuck in a C extension, a collective or `time.sleep` responds as well, and calls still run on its main thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import ray

from rl_core.cluster import ray_internals
from rl_core.errors import RayDiedError

_log = logging.getLogger(__name__)
_DAEMONS = {"raylet": "raylet", "gcs_server": "GCS server"}
_LOOK_S = 1.0
_NOTICED_S = 8.0
_KEPT_BYTES = 1 << 20
_TAIL_LINES = 5


@dataclass(frozen=True, kw_only=True)
class _Daemon:
    name: str
    pid: int
    logs: Path


@dataclass(frozen=True)
class _Reporting:
    """What to do when a daemon dies."""

    logs: Path | None = None
    give_up: Callable[[RayDiedError], None] | None = None


_reporting = _Reporting()
_watch: DaemonWatch | None = None
_thread = threading.local()


class DaemonWatch:
    """Watches the raylet of this process's node, and the GCS server if it is on this host, until `stop`."""

    def __init__(self) -> None:
        global _watch
        self.death: str | None = None
        self.noticed = threading.Event()
        self._daemons = _find()
        self._stop_read, self._stop_write = os.pipe()
        self._thread: threading.Thread | None = None
        if self._daemons and hasattr(os, "pidfd_open"):
            self._thread = threading.Thread(target=self._run, name="rlcore-ray-daemons", daemon=True)
            self._thread.start()
        _watch = self

    def stop(self) -> None:
        """Stop watching, before an intended shutdown."""
        global _watch
        if _watch is self:
            _watch = None
        os.close(self._stop_write)  # wakes the thread, which closes the other end
        if self._thread is None:
            os.close(self._stop_read)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        of: dict[int, _Daemon] = {}
        gone = None
        for daemon in self._daemons:
            try:
                descriptor = os.pidfd_open(daemon.pid)
            except ProcessLookupError:
                gone = gone or daemon
                continue
            of[descriptor] = daemon
            poll.register(descriptor, select.POLLIN)
        if gone is None:
            # If one daemon dies, its peers follow: the first is named.
            gone = next((of[descriptor] for descriptor, _ in poll.poll() if descriptor in of), None)
        for descriptor in (*of, self._stop_read):
            os.close(descriptor)
        if gone is not None and _watch is self and ray.is_initialized():
            self._report_death(gone)

    def _report_death(self, daemon: _Daemon) -> None:
        if sys.excepthook is ray_internals.worker.custom_excepthook:  # it reports to the GCS server, and would wait for it
            sys.excepthook = ray_internals.worker.normal_excepthook
        self.death = _text(daemon, _keep_logs(daemon))
        if self.noticed.wait(_NOTICED_S):
            return
        # The main thread is blocked in a Ray call: end the process with the reason before Ray ends it.
        error = RayDiedError(self.death)
        try:
            _log.error("%s", error)
            if _reporting.give_up is not None:
                _reporting.give_up(error)
            logging.shutdown()
        finally:
            os._exit(error.exit_code)


@contextmanager
def watch_daemons(*, logs: Path, give_up: Callable[[RayDiedError], None]) -> Iterator[None]:
    """Within the block, copy the logs of a daemon that dies, and end the process even if the main thread is blocked.

    Args:
        logs: Folder for copies of the daemon's logs; Ray removes its own folder.
        give_up: Called in a thread, before the process ends, if the main thread cannot detect the death.
    """
    global _reporting
    before, _reporting = _reporting, _Reporting(logs, give_up)
    try:
        yield
    finally:
        _reporting = before


def is_dead() -> bool:
    """Whether a daemon that this process's Ray needs has died."""
    if _watch is None or _watch.death is None:
        return False
    if not getattr(_thread, "is_background", False):
        _watch.noticed.set()
    return True


def mark_background_thread() -> None:
    """Declare that an error of the calling thread does not end the run, as in a pool's threads.

    If only such threads detect a death, the process is ended anyway: the main thread may be blocked in a Ray call.
    """
    _thread.is_background = True


def raise_if_dead() -> None:
    """Raise the reason if a daemon died.

    Raises:
        RayDiedError: Names the daemon and its log.
    """
    if is_dead() and _watch is not None and _watch.death is not None:
        raise RayDiedError(_watch.death)


def wait(refs: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Wait until one of `refs` is ready; returns all that are ready, or an empty list after `timeout_s`.

    Raises:
        RayDiedError: A daemon died meanwhile.
    """
    until = time.monotonic() + timeout_s
    while True:
        left = max(until - time.monotonic(), 0.0)
        ready, others = ray.wait(list(refs), num_returns=1, timeout=min(left, _LOOK_S))
        raise_if_dead()
        if ready or left <= _LOOK_S:
            more = ray.wait(others, num_returns=len(others), timeout=0)[0] if ready and others else []
            return [*ready, *more]


def last_errors(logs: Iterable[Path]) -> str:
    """The last lines of each log of standard error among `logs`, each indented and on a new line."""
    tails = (_end_of(log).decode(errors="replace").splitlines()[-_TAIL_LINES:] for log in logs if log.suffix == ".err")
    return "".join(f"\n    {line}" for tail in tails for line in tail)


def _find() -> list[_Daemon]:
    node = ray_internals.connected_node()
    session, logs = str(node.get_session_dir_path()), Path(node.get_logs_dir_path())
    daemons = []
    for process in psutil.process_iter(["name", "cmdline"]):
        name, command = process.info["name"], process.info["cmdline"] or ()
        if name == "raylet":  # of several that this process sees, the one of its node
            is_ours = all(f"--{key}={getattr(node, key)}" in command for key in ("raylet_socket_name", "node_ip_address"))
        else:
            is_ours = name in _DAEMONS and any(session in argument for argument in command)
        if is_ours:
            daemons.append(_Daemon(name=name, pid=process.pid, logs=logs))
    return daemons


def _keep_logs(daemon: _Daemon) -> list[Path]:
    """The daemon's logs, or their copies if the run keeps them."""
    files = [file for ending in (".out", ".err") if (file := daemon.logs / f"{daemon.name}{ending}").is_file()]
    if _reporting.logs is None:
        return files
    kept = []
    for file in files:
        with suppress(OSError):
            copy = _reporting.logs / f"ray-{file.name}"
            copy.write_bytes(_end_of(file))
            kept.append(copy)
    return kept


def _end_of(file: Path) -> bytes:
    with file.open("rb") as log:
        log.seek(max(file.stat().st_size - _KEPT_BYTES, 0))
        return log.read()


def _text(daemon: _Daemon, logs: Sequence[Path]) -> str:
    where = f" Its log: {', '.join(map(str, logs))}." if logs else ""
    return (
        f"Ray's {_DAEMONS[daemon.name]} (process {daemon.name}, pid {daemon.pid}) died, and no worker can run without it."
        f"{where}{last_errors(logs)}\nIf it was not killed on purpose, look for an out-of-memory kill in the kernel log "
        "(`dmesg`). To continue from the last checkpoint, run the same command again."
    )


_SIGNAL = signal.SIGUSR2
_kept_open: list[IO[bytes]] = []


def enable_read_stack() -> str:
    """Make this process respond to `read_stack`; returns the path of the output, readable while the process lives."""
    answers = tempfile.TemporaryFile()  # noqa: SIM115 - must stay open as long as the process lives
    _kept_open.append(answers)
    faulthandler.register(_SIGNAL, file=answers, all_threads=True)
    return f"/proc/{os.getpid()}/fd/{answers.fileno()}"


def read_stack(pid: int, path: str, *, timeout_s: float) -> str:
    """The stack of every Python thread of a process, innermost call first, the running thread first.

    If the process does not respond (because it is stopped or gone), a line with its state.
    """
    try:
        size = Path(path).stat().st_size
        os.kill(pid, _SIGNAL)
        return _order_threads(_wait_for_growth(path, size, timeout_s)) or _process_state(pid, timeout_s)
    except (ProcessLookupError, FileNotFoundError, PermissionError) as error:
        return f"no stack: {error}"


def _wait_for_growth(path: str, size: int, timeout_s: float) -> str:
    until = time.monotonic() + timeout_s
    last_size = size
    while time.monotonic() < until:
        time.sleep(0.05)
        current_size = Path(path).stat().st_size
        if current_size > size and current_size == last_size:
            break
        last_size = current_size
    with open(path, "rb") as answers:
        answers.seek(size)
        return answers.read().decode(errors="replace")


def _order_threads(dump: str) -> str:
    """Put the thread that was running, the last one of a dump, first, and remove Ray's own frames."""
    threads = [block for block in dump.strip().split("\n\n") if block]
    threads.sort(key=lambda block: not block.startswith("Current thread"))
    lines = [line for block in threads if "_private/gc_collect_manager" not in block for line in block.splitlines()]
    return "\n".join(line for line in lines if "/ray/_private/" not in line and "/ray/util/tracing/" not in line)


def _process_state(pid: int, timeout_s: float) -> str:
    try:
        process = psutil.Process(pid)
        cpu = process.cpu_times()
        return (
            f"no stack within {timeout_s:g} s: its process does not even run a signal handler "
            f"(state: {process.status()}, {cpu.user + cpu.system:.1f} s of CPU used, {process.num_threads()} threads)"
        )
    except psutil.NoSuchProcess:
        return "no stack: its process is gone"
