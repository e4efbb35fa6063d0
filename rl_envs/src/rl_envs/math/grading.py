"""Grades answers in a few processes that can be killed.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any

from rl_core.errors import WorkerDiedError

_START_S = 120.0
"""Start-up timeout of a process in seconds; it imports sympy, possibly on a busy machine."""
_WALL_PER_CPU = 20.0
"""A comparison may take this many times its CPU time limit in wall-clock time; then its process counts as stuck."""


class Outcome(StrEnum):
    """The outcome of one comparison."""

    RIGHT = "right"
    WRONG = "wrong"
    UNEVALUATED = "unevaluated"
    """The answer has unevaluated arithmetic: `3 + 2` for 5."""
    UNREADABLE = "unreadable"
    """The answer is neither a formula that can be parsed nor the expected text."""
    NO_ANSWER = "no_answer"
    """There is no box or an empty one; without `require_box`, no number or formula either."""
    TIMEOUT = "timeout"
    FAILED = "failed"
    """The comparison raised an exception or crashed its process twice (the expression is too deep or too large)."""


_OUTCOMES = {
    None: Outcome.NO_ANSWER,
    "EQUAL": Outcome.RIGHT,
    "UNEVALUATED": Outcome.UNEVALUATED,
    "UNREADABLE": Outcome.UNREADABLE,
    "DIFFERENT": Outcome.WRONG,
}


@dataclass(frozen=True)
class Question:
    """The expected answer and the model's completion."""

    expected: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class GradingResult:
    """The outcome of a comparison and the extracted answer."""

    outcome: Outcome
    answer: str | None = None
    boxed: bool = False
    """Whether the answer was in a box."""


class GradingPool:
    """A pool of grading processes, started when first needed and replaced when they end.

    Args:
        num_processes: Number of processes; each runs one comparison at a time.
        timeout_s: CPU time limit of one comparison, in seconds; when it expires, only its process is killed.
        require_box: Grade only boxed answers.
        allow_unevaluated: Accept unevaluated arithmetic.
    """

    def __init__(self, *, num_processes: int, timeout_s: float, require_box: bool, allow_unevaluated: bool = False) -> None:
        self._num_processes = num_processes
        self._request = {"timeout_s": timeout_s, "require_box": require_box, "allow_unevaluated": allow_unevaluated}
        self._wall_s = timeout_s * _WALL_PER_CPU
        self._idle: SimpleQueue[_Process] | None = None
        self._processes: list[_Process] = []

    def grade(self, questions: Sequence[Question]) -> list[GradingResult]:
        """Results in the order of `questions`; equal questions are graded once.

        Raises:
            WorkerDiedError: A grading process cannot be started.
        """
        distinct = list(dict.fromkeys(questions))
        if not distinct:
            return []
        idle = self._started()
        with ThreadPoolExecutor(min(self._num_processes, len(distinct)), thread_name_prefix="grade") as threads:
            results = list(threads.map(lambda question: self._grade_one(question, idle), distinct))
        found = dict(zip(distinct, results, strict=True))
        return [found[question] for question in questions]

    def process_ids(self) -> list[int]:
        """Process ids of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def shutdown(self) -> None:
        """End all processes; a later `grade` starts new ones."""
        self._idle = None
        for process in self._processes:
            process.end()
        self._processes = []

    def _started(self) -> SimpleQueue[_Process]:
        if self._idle is None:
            self._processes = [_Process() for _ in range(self._num_processes)]
            self._idle = SimpleQueue()
            for process in self._processes:
                self._idle.put(process)
        return self._idle

    def _grade_one(self, question: Question, idle: SimpleQueue[_Process]) -> GradingResult:
        process = idle.get()
        request = {"expected": question.expected, "completion": question.completion, **self._request}
        try:
            for _ in range(2):  # the process may have been killed from outside: try once more
                answer = process.ask(request, wall_s=self._wall_s)
                if answer is not None:
                    return answer
            return GradingResult(outcome=Outcome.FAILED)
        finally:
            idle.put(process)


class _Process:
    """A child process; starts at the first question and again after each end."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, if it is running."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def ask(self, request: dict[str, Any], *, wall_s: float) -> GradingResult | None:
        """The result, or None if the child ended for another reason than the time limit."""
        child = self._running()
        try:
            _write(child, request)
            reply = _read(child, wall_s=wall_s)
        except TimeoutError:
            self.end()
            return GradingResult(outcome=Outcome.TIMEOUT)
        except (BrokenPipeError, EOFError):
            ended_with = child.wait()
            self.end()
            return GradingResult(outcome=Outcome.TIMEOUT) if ended_with == -signal.SIGPROF else None
        if reply["retire"]:
            self.end()
        return _result(reply)

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
            self._child = _start()
        return self._child


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "rl_envs.math.worker"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    child = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        _read(child, wall_s=_START_S)
    except (EOFError, TimeoutError) as error:
        child.kill()
        raise WorkerDiedError(
            f"The grading process did not start ({type(error).__name__}, exit code {child.wait()}); see its output on "
            f"standard error. To run it by hand: {' '.join(command)}"
        ) from error
    return child


def _write(child: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert child.stdin is not None
    line = memoryview(json.dumps(request).encode("ascii") + b"\n")
    while line:
        line = line[child.stdin.write(line) :]


def _read(child: subprocess.Popen[bytes], *, wall_s: float) -> dict[str, Any]:
    """One line of JSON.

    Raises:
        EOFError: The child has ended.
        TimeoutError: The child did not answer within `wall_s` seconds.
    """
    assert child.stdout is not None
    poller = select.poll()  # select() refuses descriptors above 1023
    poller.register(child.stdout, select.POLLIN)
    deadline = time.monotonic() + wall_s
    line = b""
    while not line.endswith(b"\n"):
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        piece = child.stdout.read(1 << 16)
        if not piece:
            raise EOFError
        line += piece
    reply: dict[str, Any] = json.loads(line)
    return reply


def _result(reply: dict[str, Any]) -> GradingResult:
    if "error" in reply:
        return GradingResult(outcome=Outcome.FAILED, answer=reply["answer"])
    return GradingResult(outcome=_OUTCOMES[reply["comparison"]], answer=reply["answer"], boxed=reply["boxed"])
