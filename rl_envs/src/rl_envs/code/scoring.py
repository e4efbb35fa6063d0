"""Scores one program: runs it in a new session of the sandbox, and its tests outside of that session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rl_core.errors import DataError, format_value
from rl_envs.code.suites import Suite, read_suite
from rl_envs.code.testing import SuiteRunner
from rl_sandbox.interface import Outcome, SessionInterface

TEST_KEYS = ("tests", "stdin_stdout")


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


_SHORTEST_S = 0.01
_OF_RUN = {Outcome.OK: CodeOutcome.FAILED, Outcome.ERROR: CodeOutcome.ERROR, Outcome.TIMEOUT: CodeOutcome.TIMEOUT}


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


@dataclass(frozen=True, kw_only=True)
class CodeScore:
    """Result of a program.

    Attributes:
        outcome: How it did.
        passed: Number of passed tests.
        total: Number of tests.
    """

    outcome: CodeOutcome
    passed: int
    total: int


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


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Limits of a program's running time, in seconds.

    Attributes:
        call: Of all assertions together, and of each pair.
        row: Of all tests of a row together.
    """

    call: float
    row: float


def score(runner: SuiteRunner, code: str | None, tests: CodeTests, limits: TimeLimits) -> CodeScore:
    """Run all tests of a program in new sessions. After a timeout, the tests that are left fail without being run.

    Raises:
        SandboxError: A session could not be started, or was ended from outside.
    """
    if code is None:
        return CodeScore(outcome=CodeOutcome.NO_CODE, passed=0, total=tests.total)
    passed, worst = 0, Outcome.OK
    if tests.suite is not None:
        passed, worst = runner.run(code, tests.suite, min(limits.call, limits.row))
    if tests.pairs and worst not in (Outcome.TIMEOUT, Outcome.LOST):
        with runner.sandbox.open_session() as session:
            right, outcome = _pairs_passed(session, code, tests, limits)
        passed, worst = passed + right, worst if outcome is Outcome.OK else outcome
    outcome_of_all = CodeOutcome.PASSED if passed == tests.total else _OF_RUN.get(worst, CodeOutcome.KILLED)
    return CodeScore(outcome=outcome_of_all, passed=passed, total=tests.total)


def _pairs_passed(session: SessionInterface, code: str, tests: CodeTests, limits: TimeLimits) -> tuple[int, Outcome]:
    passed, worst, left = 0, Outcome.OK, limits.row
    for stdin, expected in tests.pairs:
        if worst in (Outcome.TIMEOUT, Outcome.LOST):
            break  # the rest would take as long again
        result = session.run_program(code, stdin=stdin, timeout_s=min(limits.call, left))
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
