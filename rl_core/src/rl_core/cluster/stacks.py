"""Reads the Python stack of another process, even of one that holds the interpreter lock.

A worker registers `faulthandler` on a signal, with output to an unlinked file; another process on the same host sends the
signal and reads the file through /proc. The handler is C code that needs neither a free thread nor the interpreter lock, so a
worker stuck in a C extension, a collective or `time.sleep` responds as well, and calls still run on its main thread.
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
