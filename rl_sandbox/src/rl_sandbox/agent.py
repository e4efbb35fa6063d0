"""The first process inside a sandbox: starts programs, collects what they print, and kills what they leave behind.

The sources of this module and of the modules that it imports are passed to the sandbox's interpreter, `python -I -S -c`.
Programs run in forks of this process, which are faster than starts of Python. The process is protected, so programs of the same
user cannot read its memory, trace it or open its channel; they can only kill it, which ends the session. Standard library only.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import time

from rl_sandbox.programs import SIGKILL, Settings, become_program, bind_to_parent, interpret, protect, read, run_main
from rl_sandbox.wire import (
    ERROR,
    KILLED,
    LINKED,
    OK,
    PRELOAD,
    READY,
    REPLY,
    REQUEST,
    RUN,
    STATE_LOST,
    TIMEOUT,
    TRUNCATED,
)

TYPE_CHECKING = False  # `typing` would double the start time
if TYPE_CHECKING:
    from collections.abc import Callable

    Reply = tuple[int, int, int, bytes, bytes]

_CHUNK = 1 << 16


class Capture:
    """Reads a pipe to its end and keeps the first `limit` bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.limit = descriptor, limit
        self.data, self.truncated, self.open = bytearray(), False, True
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Read the available output; returns whether there was any."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.open = False
            return False
        space = self.limit - len(self.data)
        self.data += chunk[:space]
        self.truncated |= len(chunk) > space
        return True

    def drain(self, seconds: float = 1.0) -> None:
        """Read the remaining output, for at most `seconds`, because the writer may still be open."""
        end = time.monotonic() + seconds
        while self.read() and time.monotonic() < end:
            pass

    def take(self) -> tuple[bytes, bool]:
        data, truncated = bytes(self.data), self.truncated
        self.data, self.truncated = bytearray(), False
        return data, truncated


class Child:
    """A fork that runs model-written code.

    Args:
        settings: the limits.
        body: called in the fork with `done`; its result is the exit code.
        cpu_s: CPU time limit in seconds, or None.
        keeps: whether it outlives the call and reports the end of each with a byte on `done`.
        link: descriptors that the fork gets as 3 and 4; closed here.
    """

    def __init__(
        self, settings: Settings, body: Callable[[int], int], cpu_s: float | None, keeps: bool, link: tuple[int, ...] = ()
    ) -> None:
        self.feed: int | None
        self.done: int | None = None
        done_child: int | None = None
        stdin, self.feed = os.pipe()
        out, out_child = os.pipe()
        err, err_child = os.pipe()
        if keeps:
            self.done, done_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                become_program(settings, cpu_s, (stdin, out_child, err_child, done_child, *link))
                status = body(3)
            except BaseException as error:
                _report(error, err_child)
            finally:
                os._exit(status & 0xFF)
        for descriptor in (stdin, out_child, err_child, done_child, *link):
            if descriptor is not None:
                os.close(descriptor)
        self.exited = os.pidfd_open(self.pid)
        self.out, self.err = Capture(out, settings.output), Capture(err, settings.output)
        os.set_blocking(self.feed, False)

    def communicate(self, data: bytes, end: float) -> str:
        """Pass `data` to the child's stdin and collect its output until it is done.

        Returns:
            "exited", "timeout", or the character that the child wrote to `done`.
        """
        poll = self._poll()
        pending = memoryview(data)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                return "timeout"
            ready = dict(poll.poll(left * 1000))
            for capture in (self.out, self.err):
                if capture.descriptor in ready and not capture.read() and not capture.open:
                    poll.unregister(capture.descriptor)
            if self.feed is not None and self.feed in ready:
                pending = self._write(self.feed, pending, poll)
            if self.exited in ready:
                return "exited"
            if self.done in ready:
                return os.read(self.done, 1).decode("latin-1") or "exited"

    def _poll(self) -> select.poll:
        poll = select.poll()
        for descriptor in (self.exited, self.out.descriptor, self.err.descriptor, self.done):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        if self.feed is not None:
            poll.register(self.feed, select.POLLOUT)
        return poll

    def _write(self, feed: int, pending: memoryview, poll: select.poll) -> memoryview:
        try:
            pending = pending[os.write(feed, pending[:_CHUNK]) :] if pending else pending
        except BlockingIOError:
            return pending
        except OSError:
            pending = pending[:0]
        if not pending:
            poll.unregister(feed)
            if self.done is None:
                os.close(feed)
                self.feed = None
        return pending

    def status(self) -> int:
        """Exit code of the child, which has exited; minus the number of the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        for descriptor in (self.feed, self.out.descriptor, self.err.descriptor, self.done, self.exited):
            if descriptor is not None:
                os.close(descriptor)


class Agent:
    """Serves the requests of one session."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.interpreter: Child | None = None

    def serve(self, channel: int) -> None:
        _write(channel, READY)
        while header := read(channel, REQUEST.size):
            operation, seconds, code_size, stdin_size = REQUEST.unpack(header)
            link = _read_descriptors(channel) if operation == LINKED else ()
            code, stdin = read(channel, code_size), read(channel, stdin_size)
            if operation == PRELOAD:
                exec(compile(code, "<preloaded>", "exec"), {"__name__": "preloaded"})
                outcome, status, flags, out, err = OK, 0, 0, b"", b""
            elif operation == RUN:
                outcome, status, flags, out, err = self.run(code, stdin, seconds)
            else:
                outcome, status, flags, out, err = self.run_program(code, stdin, seconds, link)
            _write(channel, REPLY.pack(outcome, status, flags, len(out), len(err)) + out + err)

    def run_program(self, code: bytes, stdin: bytes, seconds: float, link: tuple[int, ...]) -> Reply:
        child = Child(self.settings, lambda done: run_main(code), seconds, keeps=False, link=link)
        how = child.communicate(stdin, time.monotonic() + seconds)
        lost = False
        if how == "timeout":
            lost = self._kill(child, everything=True)
        status = child.status()
        lost |= self._kill(child, everything=False)
        return self._reply(child, how, status, lost, last=True)

    def run(self, code: bytes, stdin: bytes, seconds: float) -> Reply:
        if self.interpreter is None:
            self.interpreter = Child(self.settings, interpret, None, keeps=True)
        child = self.interpreter
        how = child.communicate(struct.pack("!I", len(code)) + code, time.monotonic() + seconds)
        if how not in ("timeout", "exited"):
            return self._reply(child, how, 0 if how == "0" else 1, lost=False, last=False)
        if how == "timeout":
            self._kill(child, everything=True)
        status = child.status()
        self.interpreter = None
        self._kill(child, everything=False)
        return self._reply(child, how, status, lost=True, last=True)

    def _reply(self, child: Child, how: str, status: int, lost: bool, last: bool) -> Reply:
        child.out.drain()
        child.err.drain()
        (out, out_cut), (err, err_cut) = child.out.take(), child.err.take()
        if last:
            child.close()
        outcome = TIMEOUT if how == "timeout" else OK if status == 0 else KILLED if status < 0 else ERROR
        return outcome, status, TRUNCATED * (out_cut or err_cut) + STATE_LOST * lost, out, err

    def _kill(self, child: Child, everything: bool) -> bool:
        """Kill what is left of a call; returns whether that ended the interpreter of `run`.

        Args:
            child: the child of the call, which may have exited.
            everything: whether the child still runs. Otherwise only an unknown process is a reason to kill.
        """
        if not self.settings.contained:
            _kill_group(child.pid)
            return False
        interpreter = self.interpreter.pid if self.interpreter else None
        if not everything and not _others(interpreter):
            return False
        try:
            # One call for all processes: a fork bomb cannot outrun it. It spares this process and process 1.
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            return False  # the processes that were listed have ended, and there is no interpreter
        ended, self.interpreter = self.interpreter, None
        lost = ended is not None and ended is not child
        if ended is not None and ended is not child:
            ended.status()
            ended.close()
        end = time.monotonic() + 5.0
        while time.monotonic() < end and _others(child.pid if everything else None):
            time.sleep(0.001)
        return lost


def _report(error: BaseException, errors: int) -> None:
    """Write why a fork could not run its program to its stderr, which is `errors` until the pipes are in place."""
    text = f"The sandbox could not run the program: {type(error).__name__}: {error}\n".encode("utf-8", "replace")
    for descriptor in (errors, 2):
        try:
            os.write(descriptor, text)
            return
        except OSError:
            pass


def _others(known: int | None) -> list[str]:
    """Processes besides process 1, this one and `known`."""
    spared = {1, os.getpid(), known}
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in spared]


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _read_descriptors(channel: int) -> tuple[int, ...]:
    """The two descriptors that the next byte carries."""
    import _socket  # `socket` would take longer than most programs, and few sessions need either

    end = _socket.socket(fileno=channel)
    _, messages, _, _ = end.recvmsg(1, _socket.CMSG_SPACE(8))
    end.detach()
    return struct.unpack("ii", messages[0][2])


def _write(channel: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(channel, view) :]


def main(arguments: list[str]) -> None:
    """Serve a session.

    Args:
        arguments: the descriptor of the channel, then the settings.
    """
    settings = Settings(arguments[1:])
    if settings.contained and os.getppid() != 1:
        sys.exit("This process is not in its own process namespace, so it would kill processes of the host.")
    bind_to_parent()
    compile("", "", "exec")  # prepares the types of the syntax tree, which each fork would do again
    protect(True)
    Agent(settings).serve(int(arguments[0]))
