"""Child processes that grade what a model wrote, with limits of CPU time and memory and a fixed hash seed.

Why not multiprocessing: a comparison can hang in one C call, which only killing its process stops; `fork` copies the locks
of torch's and Ray's threads; `spawn` runs the user's script again in each child unless it is guarded by
`if __name__ == "__main__"`. A child program with a pipe has none of these problems, and daemon processes may start one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from enum import Enum
from typing import IO, Any

from rl_core.errors import WorkerDiedError

_START_S = 120.0
"""Start-up timeout of a process in seconds; it imports large packages, possibly on a busy machine."""
_WALL_PER_CPU = 20.0
"""An answer may take this many times its CPU time limit in wall-clock time; then its process counts as stuck."""
_EXIT_S = 10.0
"""Time in which a child that has closed its pipes exits, in seconds."""
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""Signals that grading never causes itself."""


class Ending(Enum):
    """Why a process gave no reply."""

    CPU_LIMIT = "cpu_limit"
    """The answer used up its CPU time."""
    CRASHED = "crashed"
    """The answer crashed two processes, for example because its expression is too deep."""
    KILLED = "killed"
    """Two processes were killed from outside, for example by the kernel because the machine has no memory left."""
    STUCK = "stuck"
    """There was no reply for much longer than the CPU time limit, so the process did not run."""

    @property
    def is_failure(self) -> bool:
        """Whether something other than the answer ended the process, so that the answer must not be scored."""
        return self in (Ending.KILLED, Ending.STUCK)

    def explain(self) -> str:
        """Why the process ended, for error messages."""
        return f"its grading process was {'killed from outside twice' if self is Ending.KILLED else 'stuck'}"


class GradingProcess:
    """A child process that answers one request at a time; starts with the first one and again after each end.

    Args:
        module: The module to run, whose main program is `rl_envs.grading_worker.serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, if it is running."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any] | Ending:
        """Send a request and return the reply, with `error` if the process raised. Repeats a request once if its process ends.

        Args:
            request: A JSON object.
            timeout_s: Limit of its CPU time in seconds.

        Raises:
            WorkerDiedError: The process does not start.
        """
        line = json.dumps({**request, "timeout_s": timeout_s}).encode("ascii") + b"\n"
        reply = self._ask(line, timeout_s)
        return self._ask(line, timeout_s) if reply in (Ending.CRASHED, Ending.KILLED) else reply

    def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any] | Ending:
        child = self._running()
        wall_s = timeout_s * _WALL_PER_CPU
        try:
            _write(child, line, wall_s=wall_s)
            reply = _read(child, wall_s=wall_s)
        except TimeoutError:
            self.end()
            return Ending.STUCK
        except (BrokenPipeError, EOFError):
            status = _ended(child)
            self.end()
            if status == -signal.SIGPROF:
                return Ending.CPU_LIMIT
            return Ending.KILLED if -status in _FROM_OUTSIDE else Ending.CRASHED
        if reply["retire"]:
            self.end()
        return reply

    def end(self) -> None:
        """Kill the child and reap it."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self.pid is None:
            self.end()
            self._child = _start(self._module)
        return self._child


def _start(module: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", module]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # The order of sets of texts depends on the hash seed, and problems and scores of a library may depend on that order.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    child = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    try:
        _read(child, wall_s=_START_S)
    except (EOFError, TimeoutError) as error:
        child.kill()
        raise WorkerDiedError(
            f"The grading process did not start ({type(error).__name__}, exit code {child.wait()}); see its output on "
            f"standard error. To run it by hand: {' '.join(command)}"
        ) from error
    return child


def _ended(child: subprocess.Popen[bytes]) -> int:
    """The exit status of a child that has closed its pipes."""
    try:
        return child.wait(timeout=_EXIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _write(child: subprocess.Popen[bytes], line: bytes, *, wall_s: float) -> None:
    """Write a line; the pipe is not blocking.

    Raises:
        BrokenPipeError: The child has ended.
        TimeoutError: The child did not read the line within `wall_s` seconds.
    """
    assert child.stdin is not None
    deadline, left = time.monotonic() + wall_s, memoryview(line)
    while left:
        _await(child.stdin, select.POLLOUT, deadline)
        left = left[child.stdin.write(left) or 0 :]


def _await(pipe: IO[bytes], event: int, deadline: float) -> None:
    poller = select.poll()  # select() refuses descriptors above 1023
    poller.register(pipe, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _read(child: subprocess.Popen[bytes], *, wall_s: float) -> dict[str, Any]:
    """One line of JSON.

    Raises:
        EOFError: The child has ended.
        TimeoutError: The child did not answer within `wall_s` seconds.
    """
    assert child.stdout is not None
    deadline = time.monotonic() + wall_s
    line = b""
    while not line.endswith(b"\n"):
        _await(child.stdout, select.POLLIN, deadline)
        piece = child.stdout.read(1 << 16)
        if not piece:
            raise EOFError
        line += piece
    reply: dict[str, Any] = json.loads(line)
    return reply
