"""The tool `python`: model-written code in a sandbox, with one interpreter for each rollout."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from rl_core.tools.runner import ToolUnavailableError, current_session
from rl_envs.sandboxes import open_sandbox
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SessionInterface


class SandboxedPython:
    """Runs the calls of a rollout in one session of a sandbox, which opens with its first call; rollouts share nothing.

    A call that belongs to no rollout (`current_session() is None`) gets its own session.

    Args:
        config: Where programs run, and their limits.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sandbox: SandboxInterface | None = None
        self._interpreters: dict[str, _Interpreter] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxUnavailableError: The isolation of this machine is weaker than `sandbox.require`.
        """
        with self._lock:
            self._opened()

    def close(self) -> None:
        """End the sandbox with all its sessions."""
        with self._lock:
            for interpreter in self._interpreters.values():
                interpreter.close()
            self._interpreters.clear()
            if self._sandbox is not None:
                self._sandbox.close()
                self._sandbox = None

    def end(self, session: str) -> None:
        """End the session of a rollout, if it has one."""
        with self._lock:
            interpreter = self._interpreters.pop(session, None)
        if interpreter is not None:
            interpreter.close()

    async def python(self, code: str) -> str:
        """Runs Python code and returns what it prints. Variables and files are kept for the next calls.

        Args:
            code: Python source. The value of the last expression is printed.
        """
        session = current_session()
        with self._lock:
            interpreter = self._interpreters.get(session) if session is not None else None
            if interpreter is None:
                interpreter = _Interpreter(self._opened(), self._config)
                if session is not None:
                    self._interpreters[session] = interpreter
        try:
            return await interpreter.run(code)
        except SandboxError as error:
            raise ToolUnavailableError(f"the sandbox of the tool `python` does not work: {error}") from error
        except asyncio.CancelledError:
            if interpreter.has_started:
                raise
            # The timeout of the call expired before the model's code could run.
            raise ToolUnavailableError(
                "the sandbox of the tool `python` did not start within call_timeout_s. Raise call_timeout_s, or lower "
                "max_concurrent_calls or num_workers if the machine is overloaded"
            ) from None
        finally:
            if session is None:
                interpreter.close()

    def _opened(self) -> SandboxInterface:
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._config)
        return self._sandbox


class _Interpreter:
    """One rollout's session. Its calls run one after another, in the order in which the model made them.

    Attributes:
        has_started: Whether a session has started, so that the time of a call is that of the model's code.
    """

    def __init__(self, sandbox: SandboxInterface, config: SandboxConfig) -> None:
        self._sandbox, self._config = sandbox, config
        self._session: SessionInterface | None = None
        self._is_closed = False
        self.has_started = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="python tool")
        self._lock = threading.Lock()

    async def run(self, code: str) -> str:
        return await asyncio.wrap_future(self._thread.submit(self._run, code))

    def _run(self, code: str) -> str:
        session = self._live_session()
        if not self.has_started:
            session.run("")  # returns when the interpreter has started
            self.has_started = True
        result = session.run(code, timeout_s=self._config.timeout_s)
        if result.outcome is Outcome.LOST:
            self._end_session()  # the next call opens a new one
        return _report(result, self._config)

    def _live_session(self) -> SessionInterface:
        with self._lock:
            if self._is_closed:
                raise SandboxError("The rollout has ended.")
            if self._session is None:
                self._session = self._sandbox.open_session()
            return self._session

    def _end_session(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Kill a call that is running, and end the session."""
        with self._lock:
            self._is_closed = True
        self._end_session()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _report(result: Result, config: SandboxConfig) -> str:
    """What the model reads: the output, and what happened to its interpreter."""
    lines = [(result.stdout + result.stderr).rstrip("\n")]
    if result.truncated:
        lines.append("(output was cut)")
    if result.outcome is Outcome.TIMEOUT:
        lines.append(f"The code was stopped after {config.timeout_s:g} seconds.")
    elif result.outcome in (Outcome.KILLED, Outcome.LOST):
        lines.append("The code was ended: it used too much memory or CPU time, or ended its own processes.")
    if result.outcome is Outcome.LOST:
        lines.append("Python was restarted: variables and files are lost.")
    elif result.state_lost:
        lines.append("Python was restarted: variables are lost, files are kept.")
    return "\n".join(line for line in lines if line) or "(no output)"
