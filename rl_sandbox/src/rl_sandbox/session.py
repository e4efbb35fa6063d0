"""The outside end of a session: sends code, enforces time limits, and trusts nothing that comes back."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from rl_sandbox import wire
from rl_sandbox.interface import Outcome, Result, SandboxError, SessionInterface

_START_S = 60.0
"""Seconds in which the agent must have started."""
_GRACE_S = 10.0
"""Seconds after the time limit in which the agent must answer before the whole session is killed."""
_OUTCOMES = {wire.OK: Outcome.OK, wire.ERROR: Outcome.ERROR, wire.TIMEOUT: Outcome.TIMEOUT, wire.KILLED: Outcome.KILLED}
_CHUNK = 1 << 16


class LocalSession(SessionInterface):
    """A session whose agent is at the other end of a socket.

    The data that arrives may come from hostile code, so it is never parsed: two integers are compared with known values, and
    the rest is text. An answer that breaks the rules ends the session.

    Args:
        channel: The connected socket.
        errors: A file with the error messages of the session's start.
        end: Called once, to kill the session. Returns why something other than its programs had ended it before, or None.
        timeout_s: Default time limit of a call in seconds.
        output: Maximum number of bytes of stdout, and of stderr.
        grace_s: Seconds after the time limit in which the agent must answer. Then the session is killed.
        start_s: Seconds in which the agent must have started.
    """

    def __init__(
        self,
        channel: socket.socket,
        errors: int,
        end: Callable[[], str | None],
        *,
        timeout_s: float,
        output: int,
        grace_s: float = _GRACE_S,
        start_s: float = _START_S,
    ) -> None:
        self._channel, self._errors, self._end = channel, errors, end
        self._timeout_s, self._output, self._grace_s, self._start_s = timeout_s, output, grace_s, start_s
        self._calls = threading.Lock()
        self._ending = threading.Lock()
        self._started = False
        self._start_failure: str | None = None
        self._lost = False
        self._ended_by: str | None = None
        self._closed = False

    def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        return self._call(wire.RUN, code, "", timeout_s, [])

    def run_program(
        self, code: str, *, stdin: str = "", timeout_s: float | None = None, link: tuple[int, int] | None = None
    ) -> Result:
        ends = list(link or ())
        try:
            return self._call(wire.LINKED if ends else wire.PROGRAM, code, stdin, timeout_s, ends)
        finally:
            _close(ends)

    def preload(self, code: str) -> bool:
        result = self._call(wire.PRELOAD, code, "", self._start_s, [])
        if result.outcome is not Outcome.OK:
            reason = self.start_errors().strip() or f"no answer within {self._start_s:g} seconds"
            raise SandboxError(f"Modules could not be preloaded: {reason}")
        return True

    def wait_until_started(self) -> None:
        with self._calls:
            self._refuse_if_closed()
            self._await_start()

    def _call(self, operation: int, code: str, stdin: str, timeout_s: float | None, link: list[int]) -> Result:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        # Lone surrogates, which a tokenizer can produce, become question marks.
        source, entered = (text.encode("utf-8", "replace") for text in (code, stdin))
        with self._calls:
            self._refuse_if_closed()
            started = time.monotonic()
            if self._lost:
                return self._lost_result(started)
            self._await_start()
            try:
                started = time.monotonic()
                end = started + seconds + self._grace_s
                self._send(wire.REQUEST.pack(operation, seconds, len(source), len(entered)), end)
                if link:
                    socket.send_fds(self._channel, [wire.LINK], link)
                    _close(link)  # the program's end must be the only one, so that the other side notices when it ends
                self._send(source + entered, end)
                return self._receive(started, end)
            except TimeoutError:
                self._give_up()
                return self._lost_result(started, Outcome.TIMEOUT)
            except (OSError, EOFError, ValueError):
                self._give_up()
                return self._lost_result(started)

    def _await_start(self) -> None:
        """Wait until the agent runs, so that the start does not count as time of the first call.

        Raises:
            SandboxError: It did not start, or the session was closed. No program has run, so no program is responsible.
        """
        if not self._started and self._start_failure is None:
            try:
                self._started = self._read(len(wire.READY), time.monotonic() + self._start_s) == wire.READY
                self._start_failure = None if self._started else "its first message is not the agent's"
            except TimeoutError:
                self._start_failure = f"no answer within {self._start_s:g} seconds"
            except (OSError, EOFError):
                self._start_failure = "it ended without an error message"
            if not self._started:
                self._start_failure = self.start_errors().strip() or self._start_failure
                self._kill()
        self._refuse_if_closed()
        if self._start_failure is not None:
            raise SandboxError(f"The session did not start: {self._start_failure}")

    def _receive(self, started: float, end: float) -> Result:
        outcome, code, flags, out, err = wire.REPLY.unpack(self._read(wire.REPLY.size, end))
        if outcome not in _OUTCOMES or max(out, err) > self._output:
            raise ValueError("the answer is not one of the agent's")
        stdout, stderr = (self._read(size, end).decode("utf-8", "replace") for size in (out, err))
        return Result(
            outcome=_OUTCOMES[outcome],
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            truncated=bool(flags & wire.TRUNCATED),
            seconds=time.monotonic() - started,
            state_lost=bool(flags & wire.STATE_LOST),
        )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxError("This session is closed: open a new one with open_session().")

    def _lost_result(self, started: float, outcome: Outcome = Outcome.LOST) -> Result:
        """Result of a call that ended the session; raises SandboxError if the program is not responsible."""
        self._refuse_if_closed()
        if self._ended_by is not None:
            raise SandboxError(f"The session was ended from outside: {self._ended_by}. Open a new one with open_session().")
        seconds = time.monotonic() - started
        return Result(outcome=outcome, exit_code=None, stdout="", stderr="", truncated=False, seconds=seconds, state_lost=True)

    def _send(self, data: bytes, end: float) -> None:
        view = memoryview(data)
        while view:
            self._limit(end)
            view = view[self._channel.send(view[:_CHUNK]) :]

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._limit(end)
            chunk = self._channel.recv(min(size - len(data), _CHUNK))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _limit(self, end: float) -> None:
        """Bound the next operation by the end of the call, so that a slow trickle of bytes does not extend it."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)

    def _give_up(self) -> None:
        self._lost = True
        self._kill()

    def _kill(self) -> None:
        with self._ending:
            end, self._end = self._end, _nothing
            self._ended_by = self._ended_by or end()

    def start_errors(self) -> str:
        """What the processes that start and control the session wrote to stderr."""
        return os.pread(self._errors, _CHUNK, 0).decode("utf-8", "replace")

    def close(self) -> None:
        already, self._closed = self._closed, True
        if already:
            return
        self._kill()  # a call that is running now reads the end of the channel
        with self._calls:
            self._channel.close()
            os.close(self._errors)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _nothing() -> None:
    return None
