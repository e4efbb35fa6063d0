"""What a sandbox must implement: sessions that run model-written programs and return what they printed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from rl_core.errors import RLCoreError, UserError


class SandboxUnavailableError(UserError):
    """No isolation level works that is as strong as required; names the reason for each level and what to change."""


class SandboxError(RLCoreError):
    """A session could not be started, was ended from outside, or is closed. Not raised for anything that a program does."""


class Outcome(Enum):
    """How a call ended."""

    OK = "ok"
    """Exit code 0, or no exception. The program decides this, so it is not proof that it did its work."""
    ERROR = "error"
    """Another exit code, or an exception, which is in `stderr`."""
    TIMEOUT = "timeout"
    """The time limit was reached; all processes of the session were killed."""
    KILLED = "killed"
    """A signal ended the program, for example because of a memory or CPU limit."""
    LOST = "lost"
    """The session ended, because the program killed the process that controls it. Open a new one."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one call.

    Attributes:
        outcome: How the call ended.
        exit_code: Exit code of a program, or minus the number of the signal that ended it; None if there is none.
        stdout: What was printed, decoded as UTF-8; undecodable bytes become U+FFFD. At most `output_kb`.
        stderr: The same for stderr.
        truncated: Whether output was discarded because it exceeded the limit.
        seconds: Wall-clock seconds of the call, measured outside the sandbox.
        state_lost: Whether the variables of earlier `run` calls were lost, because their interpreter exited or was killed.
    """

    outcome: Outcome
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    seconds: float
    state_lost: bool


class _Closing(ABC):
    """Closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; calling it twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SessionInterface(_Closing):
    """One isolation unit, for one rollout. Calls from several threads run one after another."""

    @abstractmethod
    def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """Run Python code in the session's interpreter, which keeps variables between calls.

        The value of a last expression is printed, as in a notebook. After a timeout or an exit of the interpreter, the next
        call starts a new one; files remain.

        Args:
            code: Python source.
            timeout_s: Wall-clock limit in seconds; defaults to the config's.

        Raises:
            SandboxError: The session did not start, was ended from outside during the call or before it, or is closed.
        """

    @abstractmethod
    def run_program(
        self, code: str, *, stdin: str = "", timeout_s: float | None = None, link: tuple[int, int] | None = None
    ) -> Result:
        """Run a Python program in a new process of the session, with the session's files as its working folder.

        Processes that the program leaves behind are killed when it ends. This also ends the interpreter of `run`, which is
        reported as `state_lost`.

        Args:
            code: Source of the program, which runs as `__main__`.
            stdin: Its standard input, encoded as UTF-8.
            timeout_s: Wall-clock limit in seconds; defaults to the config's.
            link: Two pipe ends, which the program gets as descriptor 3 to read from and 4 to write to. The call closes them.

        Raises:
            SandboxError: The session did not start, was ended from outside during the call or before it, or is closed.
        """

    def preload(self, code: str) -> bool:
        """Run trusted code in the process from which programs are forked, so that they need not load the same modules again.

        Args:
            code: Source that adds modules to `sys.modules`. It must neither fail nor come from a model.

        Returns:
            Whether programs find the modules; False for a sandbox that starts a new interpreter for each.

        Raises:
            SandboxError: The session did not start, was ended from outside, or is closed, or the code failed.
        """
        return False

    def wait_until_started(self) -> None:
        """Wait until a call would start its program at once. A sandbox whose sessions start in `open_session` needs none.

        Raises:
            SandboxError: The session did not start, or is closed.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Kill all processes of the session and delete its files. A call that is running raises SandboxError."""


class SandboxInterface(_Closing):
    """Opens sessions. Its class is constructed with a `SandboxConfig`. All methods may be called from any thread.

    The limits of the config apply to every sandbox. Other settings are in `options`, which it must check.
    """

    @abstractmethod
    def open_session(self) -> SessionInterface:
        """Start a session that shares nothing with other sessions.

        Raises:
            SandboxError: It could not be started.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all sessions; calling it twice is fine."""
