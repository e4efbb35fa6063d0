"""Runs a program and its tests in two sessions of the sandbox that are linked by two pipes.

The program has a new session. The tests' session is used again for other rows, in a new process each: it runs only the code of
the data. It ends with the first tests that do not end by themselves.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rl_core.errors import UserError
from rl_envs.code.harness import modules_source, program_source, tests_source
from rl_envs.code.suites import Suite
from rl_sandbox.interface import Outcome, SandboxError, SandboxInterface, SessionInterface

_GRACE_S = 3.0
"""Seconds that tests have for their end after the limit at which their program is killed."""


@dataclass
class _TestsSession:
    session: SessionInterface
    modules: str = ""
    """What precedes each program, because it is not preloaded."""
    reusable: bool = False


class SuiteRunner:
    """Runs test suites in one sandbox. Its methods may be called from any thread.

    Args:
        sandbox: Where programs and tests run.
        concurrency: Number of suites that run at the same time.
    """

    def __init__(self, sandbox: SandboxInterface, concurrency: int) -> None:
        self.sandbox = sandbox
        self._programs = ThreadPoolExecutor(concurrency, thread_name_prefix="code-program")
        self._idle: SimpleQueue[_TestsSession] = SimpleQueue()

    def run(self, code: str, suite: Suite, timeout_s: float) -> tuple[int, Outcome]:
        """Run the tests of a program.

        Returns:
            The number of assertions that passed, and how the program ended: OK if it ran until its tests ended, or ERROR if
            they raised.

        Raises:
            SandboxError: A session could not be started, or was ended from outside.
        """
        with self.sandbox.open_session() as session, self._tests_session() as tests:
            session.wait_until_started()
            (requests, to_program), (answers, to_tests) = os.pipe(), os.pipe()
            program = self._programs.submit(
                session.run_program, program_source(code), timeout_s=timeout_s, link=(requests, to_tests)
            )
            result = tests.session.run_program(
                tests.modules + tests_source(suite), timeout_s=timeout_s + _GRACE_S, link=(answers, to_program)
            )
            tests.reusable = result.outcome is Outcome.OK
            if not tests.reusable:
                return 0, result.outcome
            passed, outcome = result.stdout.split()
            if outcome == "lost":
                return int(passed), program.result().outcome
            return int(passed), Outcome.ERROR if outcome == "error" else Outcome.OK

    @contextmanager
    def _tests_session(self) -> Iterator[_TestsSession]:
        """A session for tests; an idle one if there is any."""
        try:
            tests = self._idle.get_nowait()
        except Empty:
            tests = _TestsSession(self.sandbox.open_session())
        is_new, tests.reusable = not tests.reusable, False
        try:
            if is_new:
                _check(tests.session)
                tests.modules = "" if tests.session.preload(modules_source()) else modules_source()
            tests.session.wait_until_started()
            yield tests
        except SandboxError:
            # The process that started the sessions may have ended, and all idle ones with it.
            tests.reusable = False
            self._close_idle()
            raise
        finally:
            if tests.reusable:
                self._idle.put(tests)
            else:
                tests.session.close()

    def close(self) -> None:
        """Close the idle sessions."""
        self._programs.shutdown(cancel_futures=True)
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(Empty):
            while True:
                self._idle.get_nowait().session.close()


def _check(session: SessionInterface) -> None:
    """Raise UserError if programs in the sandbox cannot be linked."""
    if "link" not in inspect.signature(session.run_program).parameters:
        raise UserError(
            f"{type(session).__name__}.run_program has no argument `link`, so the sandbox cannot link a program to its tests. "
            "Only rows with `stdin_stdout` work. Implement `link` (see rl_sandbox.SessionInterface), or use `local`."
        )
