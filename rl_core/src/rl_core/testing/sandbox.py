"""Conformance of sandboxes (`rl_sandbox.SandboxInterface`): what programs print, keep and leave behind, and their limits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from rl_core.config.validator import section_of_values
from rl_core.errors import RLCoreError
from rl_core.plugins.component import Component, Kind
from rl_core.testing.promises import Conformance, Found, creation, must_raise, promise

_RUNS = "test_a_result_has_what_a_program_printed"
_SECRET = "RLCORE_CONFORMANCE_SECRET"
_LIMITS = {"timeout_s": 60.0, "output_kb": 1, "memory_mb": 256}


class SandboxConformance(Conformance[Any]):
    """Promises of sandboxes. `config` has keys of the section `sandbox`, such as `options`."""

    kind = Kind.SANDBOX
    minimum = 12
    created_again = True

    @classmethod
    def create(cls) -> Any:
        section: Any = Component.from_path("rl_sandbox.config:SandboxConfig").load()
        interface: Any = Component.from_path("rl_sandbox.interface:SandboxInterface").load()
        with patch.dict(os.environ, {_SECRET: "secret"}):
            values = {"backend": cls.component, **_LIMITS, **cls.config}
            sandbox = cls.registered().load(expect=interface)(section_of_values(section, values, name="sandbox"))
            cls._exits.callback(sandbox.close)
            sandbox.open_session().close()
        return sandbox

    test_it_is_created_from_its_section = creation("It is created with a `SandboxConfig`, and opens a session.")

    @promise("A result has stdout, stderr and exit code of a program, which reads `stdin` and runs as `__main__`.")
    def test_a_result_has_what_a_program_printed(self) -> None:
        code = "import sys; print(input()[::-1], __name__); print('no', file=sys.stderr); sys.exit(3)"
        self._expect(self._session().run_program(code, stdin="äbc\n"), "error", "cbä __main__\n", "no\n", exit_code=3)
        self._expect(self._session().run_program("print(1)"), "ok", "1\n", "", exit_code=0)

    @promise("`run` prints the value of a last expression and keeps variables between calls.", after=_RUNS)
    def test_run_keeps_variables(self) -> None:
        session = self._session()
        self._expect(session.run("x = 6"), "ok", "")
        self._expect(session.run("x * 7"), "ok", "42\n")

    @promise("An exception is an error whose traceback is in `stderr`; the session continues.", after=_RUNS)
    def test_an_exception_is_in_stderr(self) -> None:
        session = self._session()
        session.run("x = 1")
        for run in (session.run, session.run_program):
            result = run("1 / 0")
            self._expect(result, "error")
            if "ZeroDivisionError" not in result.stderr:
                raise Found(f"`1 / 0` has the stderr {result.stderr!r}.")
        self._expect(session.run("print(1)"), "ok", "1\n")

    @promise("A call that reaches `timeout_s` is a timeout; the next `run` starts a new interpreter.", after=_RUNS)
    def test_a_timeout_ends_the_call(self) -> None:
        session = self._session()
        session.run("x = 1")
        result = session.run("while True: pass", timeout_s=1.0)
        self._expect(result, "timeout")
        if not result.state_lost and session.run("print('x' in dir())").stdout != "True\n":
            raise Found("the variables are lost after a timeout, but `state_lost` is false.")
        self._expect(session.run_program("while True: pass", timeout_s=1.0), "timeout")
        self._expect(session.run("print(1)"), "ok", "1\n")

    @promise("A program that needs more than `memory_mb` does not end well, and the session continues.", after=_RUNS)
    def test_memory_is_limited(self) -> None:
        session = self._session()
        result = session.run_program("x = bytearray(2**30); print(len(x))")
        if result.outcome.value == "ok" or result.stdout:
            raise Found(f"a program filled 1 GiB with `memory_mb` {_LIMITS['memory_mb']}.")
        self._expect(session.run_program("print(1)"), "ok", "1\n")

    @promise("Output beyond `output_kb` is discarded, and `truncated` says so; undecodable bytes are U+FFFD.", after=_RUNS)
    def test_output_is_limited(self) -> None:
        session = self._session()
        result = session.run_program("print('x' * 3000)")
        if not result.truncated or not 0 < len(result.stdout) <= 1024:
            raise Found(f"of 3000 characters, {len(result.stdout)} were returned, and `truncated` is {result.truncated}.")
        result = session.run_program("import sys; sys.stdout.buffer.write(b'a\\xffb')")
        self._expect(result, "ok", "a\ufffdb")
        if result.truncated:
            raise Found("`truncated` is true for three bytes.")

    @promise("Sessions share neither files nor variables; calls of one session share its files.", after=_RUNS)
    def test_sessions_share_nothing(self) -> None:
        one, other = self._session(), self._session()
        one.run("x = 1; open('note', 'w').write('mine')")
        self._expect(one.run_program("print(open('note').read())"), "ok", "mine\n")
        self._expect(other.run("import os; print('x' in dir(), os.path.exists('note'))"), "ok", "False False\n")

    @promise("Processes that a program leaves behind are killed when it ends.", after=_RUNS)
    def test_no_process_is_left(self) -> None:
        session = self._session()
        child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
        pid = session.run_program(f"import subprocess, sys; print({child}.pid)").stdout.strip()
        alive = f"import os\ntry: os.kill({pid}, 0); print('alive')\nexcept ProcessLookupError: print('gone')"
        self._expect(session.run_program(alive), "ok", "gone\n")

    @promise("Programs do not see the environment variables of this process.", after=_RUNS)
    def test_programs_do_not_see_our_environment(self) -> None:
        with patch.dict(os.environ, {_SECRET: "secret"}):
            self._expect(self._session().run_program(f"import os; print(os.environ.get('{_SECRET}'))"), "ok", "None\n")

    @promise("Sessions may run at the same time, from several threads, and each call has its result.", after=_RUNS)
    def test_sessions_run_at_the_same_time(self) -> None:
        sessions = [self._session() for _ in range(4)]
        with ThreadPoolExecutor(len(sessions)) as threads:
            results = threads.map(lambda at: [sessions[at].run_program(f"print({at}, {n})") for n in range(3)], range(4))
        for at, of_session in enumerate(results):
            for number, result in enumerate(of_session):
                self._expect(result, "ok", f"{at} {number}\n")

    @promise("`close` of a session or of the sandbox may be called twice; a closed session raises `SandboxError`.")
    def test_a_closed_session_is_an_error(self) -> None:
        sandbox = type(self).create()
        for closes_sandbox in (False, True):
            session = sandbox.open_session()
            for _ in range(2):
                (sandbox if closes_sandbox else session).close()
            closed = "the sandbox" if closes_sandbox else "it"
            with must_raise(RLCoreError, otherwise=f"a session still runs code after `close` of {closed}."):
                session.run("print(1)")

    def _session(self) -> Any:
        return self._exits.enter_context(self.subject().open_session())

    def _expect(self, result: Any, outcome: str, stdout: str | None = None, stderr: str | None = None, **more: Any) -> None:
        expected = {"stdout": stdout, "stderr": stderr, **more}
        wrong = [name for name, value in expected.items() if value is not None and getattr(result, name) != value]
        if result.outcome.value != outcome or wrong:
            raise Found(f"{result}; expected the outcome {outcome}" + "".join(f", {name} {expected[name]!r}" for name in wrong))
