"""The environment `code`: the completion's program must pass the tests of its row.

A program and its tests run in two sessions of the sandbox, linked by two pipes. The program has a new session. The session of
the tests is used again for other rows, in a new process each: it runs only the code of the data. It ends with the first tests
that do not end by themselves.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any

from rl_core.environments import Score, ScorerEnvironment, final_text
from rl_core.errors import DataError, UserError, format_value
from rl_core.interfaces.environment import Conversation
from rl_envs.code.harness import modules_source, program_source, tests_source
from rl_envs.code.suites import Suite, read_suite
from rl_envs.config import CodeEnvironmentConfig
from rl_envs.sandboxes import open_sandbox
from rl_sandbox.interface import Outcome, SandboxError, SandboxInterface, SessionInterface

_log = logging.getLogger("rlcore.code")
TEST_KEYS = ("tests", "stdin_stdout")
_PYTHON = ("python", "python3", "py")
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)[^\n`]*$", re.MULTILINE)
_SHORTEST_S = 0.01
_GRACE_S = 3.0
"""Seconds that tests have for their end after the limit at which their program is killed."""


class CodeOutcome(StrEnum):
    """How a program did."""

    PASSED = "passed"
    """All tests passed."""
    FAILED = "failed"
    """It ran to its end, but a test failed."""
    ERROR = "error"
    """A test failed, and the program raised or exited with an error."""
    TIMEOUT = "timeout"
    """A test failed, and the program reached its time limit."""
    KILLED = "killed"
    """A test failed, and the program was killed or ended its session."""
    NO_CODE = "no_code"
    """The completion has no code block."""


_FINAL = (Outcome.TIMEOUT, Outcome.LOST)
"""After these, other tests would take as long again, or have no session."""
_OF_RUN = {Outcome.OK: CodeOutcome.FAILED, Outcome.ERROR: CodeOutcome.ERROR, Outcome.TIMEOUT: CodeOutcome.TIMEOUT}


class CodeEnvironment(ScorerEnvironment):
    """Runs the last code block of a completion in a sandbox and compares its results with the row's tests. See `docs/code.md`.

    Each row's metadata contains `tests` (assert lines, or functions with asserts, with `entry_point` for `check(candidate)`)
    or `stdin_stdout` (pairs of `input` and `output`), or both. `step` adds `code_outcome` (`passed`, `failed`, `error`,
    `timeout`, `killed` or `no_code`), `tests_passed` and `tests_total`. A row fails, and is not scored, if its sandbox does not
    start or is ended from outside.

    Args:
        config: `CodeEnvironmentConfig`, a dict of its keys, or None for its defaults.

    Raises:
        SandboxUnavailableError: The isolation of this machine is weaker than `sandbox.require`.
    """

    config_class = CodeEnvironmentConfig
    config: CodeEnvironmentConfig

    def __init__(self, config: CodeEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._sandbox = open_sandbox(self.config.sandbox)
        self._runner = SuiteRunner(self._sandbox, self.config.max_concurrency)
        self._threads = ThreadPoolExecutor(self.config.max_concurrency, thread_name_prefix="code")

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Run the programs of B completions at the same time.

        Returns:
            Rewards named `all_passed` (1.0 or 0.0) or `passed_share` (0.0 to 1.0); the answers are the programs.

        Raises:
            DataError: A row has no tests, they do not have the documented form, or their expected output is longer than
                `sandbox.output_kb`.
        """
        output_kb = self.config.sandbox.output_kb
        tests = [read_tests(row, info, output_kb=output_kb) for row, info in enumerate(metadata)]
        codes = [last_code_block(str(log[-1].get("content") or "")) for log in message_log_batch]
        return list(self._threads.map(self._score, codes, tests))

    def _score(self, code: str | None, tests: CodeTests) -> Score:
        try:
            outcome, passed = self._run(code, tests)
        except SandboxError as error:
            _log.warning("code: a row has failed, because its sandbox does not work: %s", error)
            failure = f"the sandbox does not work: {error}"
            return Score({self.config.reward: 0.0}, answer=code, reply="not scored", failure=failure)
        rewards = {"all_passed": float(outcome is CodeOutcome.PASSED), "passed_share": passed / tests.total}
        outcomes = {f"{one.value}_frac": outcome is one for one in CodeOutcome}
        accuracy = outcomes.pop(f"{CodeOutcome.PASSED.value}_frac")
        return Score(
            {self.config.reward: rewards[self.config.reward]},
            {"accuracy": accuracy, "passed_share": rewards["passed_share"], **outcomes},
            answer=code,
            metadata={"code_outcome": outcome.value, "tests_passed": passed, "tests_total": tests.total},
            reply=f"{passed} of {tests.total} tests passed",
        )

    def _run(self, code: str | None, tests: CodeTests) -> tuple[CodeOutcome, int]:
        """How a program does in new sessions, and the number of passed tests. After a timeout, the tests that are left fail.

        Raises:
            SandboxError: A session could not be started, or was ended from outside.
        """
        if code is None:
            return CodeOutcome.NO_CODE, 0
        passed, worst = 0, Outcome.OK
        # A slow program must reach its own limit, which is a result, before the timeout of the step, which is a failure.
        call_s, row_s = self.config.sandbox.timeout_s, self.config.step_timeout_s / 2
        if tests.suite is not None:
            passed, worst = self._runner.run(code, tests.suite, min(call_s, row_s))
        if tests.pairs and worst not in _FINAL:
            with self._sandbox.open_session() as session:
                right, outcome = _pairs_passed(session, code, tests, call_s=call_s, row_s=row_s)
            passed, worst = passed + right, worst if outcome is Outcome.OK else outcome
        return CodeOutcome.PASSED if passed == tests.total else _OF_RUN.get(worst, CodeOutcome.KILLED), passed

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._runner.close()
        self._sandbox.close()


def last_code_block(completion: str) -> str | None:
    """The program of a completion: its last fenced block of Python; None if there is none.

    If no block names Python, it is the last block that names no language; such a block after one of Python is usually the
    program's output. A block that is not closed ends with the completion: a cut-off completion is run as far as it
    goes. Blocks inside `<think>` do not count.
    """
    text, position = final_text(completion), 0
    blocks: dict[bool, str] = {}
    while (start := _FENCE.search(text, position)) is not None:
        marks, language = start["marks"], start["language"].lower()
        closing = re.compile(rf"^ {{0,3}}{re.escape(marks[0])}{{{len(marks)},}}[ \t]*$", re.MULTILINE)
        end = closing.search(text, start.end())
        if language in ("", *_PYTHON):
            content = text[start.end() : end.start() if end else len(text)]
            blocks[bool(language)] = _without_indent(content, len(start["indent"])).strip("\n")
        if end is None:
            break
        position = end.end()
    return blocks.get(True, blocks.get(False))


def _without_indent(content: str, width: int) -> str:
    """The content without as many spaces at the start of its lines as its fence has: a block in a list item is indented."""
    return re.sub(rf"^ {{1,{width}}}", "", content, flags=re.MULTILINE) if width else content


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of a row.

    Attributes:
        suite: Tests with assertions, or None.
        pairs: Standard inputs and the expected outputs.
        output_limit: Number of bytes of a program's output that are read.
    """

    suite: Suite | None
    pairs: tuple[tuple[str, str], ...]
    output_limit: int

    @property
    def total(self) -> int:
        """Number of tests: assertions and pairs."""
        return len(self.pairs) + (self.suite.total if self.suite else 0)


def read_tests(row: int, info: Any, *, output_kb: int) -> CodeTests:
    """The tests in the metadata of a row.

    Args:
        row: Index of the row, for errors.
        info: Its metadata.
        output_kb: Maximum size of a program's output in KiB (`sandbox.output_kb`).

    Raises:
        DataError: There are none, they do not have the documented form, or a correct program's output would be cut.
    """
    if not isinstance(info, Mapping) or not any(info.get(key) for key in TEST_KEYS):
        description = sorted(info) if isinstance(info, Mapping) else type(info).__name__
        raise DataError(
            f"Row {row} has no tests: its metadata has {description}, but the environment needs {' or '.join(TEST_KEYS)}."
        )
    tests, entry_point = info.get("tests"), info.get("entry_point")
    if isinstance(tests, list | tuple) and all(isinstance(line, str) for line in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str | None):
        raise DataError(f"Row {row}: `tests` must be Python source or a list of assert lines, not {format_value(tests)}.")
    if entry_point is not None and not _is_name(entry_point):
        raise DataError(f"Row {row}: `entry_point` must be the name of a function, not {format_value(entry_point)}.")
    limit = output_kb * 1024
    return CodeTests(
        suite=_suite(row, tests, entry_point) if tests else None,
        pairs=_pairs(row, info.get("stdin_stdout"), limit),
        output_limit=limit,
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _suite(row: int, tests: str, entry_point: str | None) -> Suite:
    try:
        return read_suite(tests, entry_point)
    except DataError as error:
        raise DataError(f"Row {row}: {error}") from error


def _pairs(row: int, pairs: Any, limit: int) -> tuple[tuple[str, str], ...]:
    if pairs is None:
        return ()
    if not isinstance(pairs, list | tuple):
        raise DataError(
            f"Row {row}: `stdin_stdout` must be a list of {{input: text, output: text}}, not {format_value(pairs)}."
        )
    read = tuple(_pair(row, pair) for pair in pairs)
    for _, expected in read:
        size = len(expected.rstrip().encode("utf-8", "replace"))
        if size > limit:
            raise DataError(
                f"Row {row}: an expected output of `stdin_stdout` has {size} bytes, but only the first {limit} of a program's "
                "output are read, so a correct program would fail. Raise `sandbox.output_kb`, or remove the row.",
                key="sandbox.output_kb",
            )
    return read


def _pair(row: int, pair: Any) -> tuple[str, str]:
    match (pair.get("input"), pair.get("output")) if isinstance(pair, Mapping) else pair:
        case (str(stdin), str(stdout)):
            return stdin, stdout
    raise DataError(f"Row {row}: an entry of `stdin_stdout` must be {{input: text, output: text}}, not {format_value(pair)}.")


def _pairs_passed(
    session: SessionInterface, code: str, tests: CodeTests, *, call_s: float, row_s: float
) -> tuple[int, Outcome]:
    passed, worst, left = 0, Outcome.OK, row_s
    for stdin, expected in tests.pairs:
        if worst in _FINAL:
            break
        result = session.run_program(code, stdin=stdin, timeout_s=min(call_s, left))
        left = max(left - result.seconds, _SHORTEST_S)
        worst = result.outcome if result.outcome is not Outcome.OK else worst
        is_whole = not result.truncated or len(result.stdout.encode("utf-8", "replace")) < tests.output_limit
        passed += result.outcome is Outcome.OK and is_whole and same_output(result.stdout, expected)
    return passed, worst


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are equal, apart from white space at the ends of lines and of the text."""
    return _lines(found) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


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
