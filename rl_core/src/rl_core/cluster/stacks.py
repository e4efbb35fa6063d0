"""The Python stack of another process, even one that holds the interpreter lock; knows no Ray.

A worker registers `faulthandler` on a signal, writing into an unlinked file; whoever is on the same host sends the
signal and reads the file through /proc. The handler is C code that needs neither a free thread nor the interpreter
lock, so a worker stuck in a C extension, a collective or `time.sleep` answers alike, and its calls keep the main thread.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import IO

import psutil

_SIGNAL = signal.SIGUSR2
_kept_open: list[IO[bytes]] = []


def install() -> str:
    """Makes this process answer `read_stack`; returns the path of its answers, readable while it lives."""
    answers = tempfile.TemporaryFile()  # noqa: SIM115 - it must stay open as long as the process lives
    _kept_open.append(answers)
    faulthandler.register(_SIGNAL, file=answers, all_threads=True)
    return f"/proc/{os.getpid()}/fd/{answers.fileno()}"


def read_stack(pid: int, path: str, *, timeout_s: float) -> str:
    """What every Python thread of that process is doing, innermost call first, the busiest thread first.

    Where no answer comes (the process is stopped, or is gone), a line says so, with the process's state.
    """
    try:
        size = Path(path).stat().st_size
        os.kill(pid, _SIGNAL)
        return _order_threads(_wait_for_growth(path, size, timeout_s)) or _process_state(pid, timeout_s)
    except (ProcessLookupError, FileNotFoundError, PermissionError) as error:
        return f"no stack: {error}"


def _wait_for_growth(path: str, size: int, timeout_s: float) -> str:
    until = time.monotonic() + timeout_s
    seen = size
    while time.monotonic() < until:
        time.sleep(0.05)
        now = Path(path).stat().st_size
        if now > size and now == seen:
            break
        seen = now
    with open(path, "rb") as answers:
        answers.seek(size)
        return answers.read().decode(errors="replace")


def _order_threads(dump: str) -> str:
    """The thread that was running comes last in a dump and interests most; Ray's own frames interest nobody."""
    threads = [block for block in dump.strip().split("\n\n") if block]
    threads.sort(key=lambda block: not block.startswith("Current thread"))
    return "\n".join(_without_ray(block) for block in threads if "_private/gc_collect_manager" not in block)


def _without_ray(block: str) -> str:
    hidden = ("/ray/_private/", "/ray/util/tracing/")
    return "\n".join(line for line in block.splitlines() if not any(part in line for part in hidden))


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
