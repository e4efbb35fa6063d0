"""Scores one program: runs its tests in a new session of the sandbox and compares the results outside of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rl_core.errors import DataError
from rl_envs.code.assertions import SplitTests, holds, split_tests
from rl_envs.code.harness import harness, read_observations
from rl_sandbox.interface import Outcome, SandboxInterface, SessionInterface

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


_OF_RUN = {Outcome.OK: CodeOutcome.FAILED, Outcome.ERROR: CodeOutcome.ERROR, Outcome.TIMEOUT: CodeOutcome.TIMEOUT}


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of a row.

    Attributes:
        assertions: Split assertions, or None.
        pairs: Standard inputs and the expected outputs.
    """

    assertions: SplitTests | None
    pairs: tuple[tuple[str, str], ...]

    @property
    def total(self) -> int:
        """Number of tests: assertions and pairs."""
        return len(self.pairs) + (len(self.assertions.conditions) if self.assertions else 0)


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


def read_tests(row: int, info: Any) -> CodeTests:
    """The tests in the metadata of a row.

    Raises:
        DataError: There are none, or they do not have the documented form.
    """
    if not isinstance(info, Mapping) or not any(info.get(key) for key in TEST_KEYS):
        found = sorted(info) if isinstance(info, Mapping) else type(info).__name__
        raise DataError(
            f"Row {row} has no tests: its metadata has {found}, but the environment needs {' or '.join(TEST_KEYS)}."
        )
    tests, entry_point = info.get("tests"), info.get("entry_point")
    if isinstance(tests, list | tuple) and all(isinstance(line, str) for line in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str | None) or not isinstance(entry_point, str | None):
        raise DataError(
            f"Row {row}: `tests` must be Python source or a list of assert lines, and `entry_point` a function's name."
        )
    return CodeTests(
        assertions=split_tests(tests, entry_point) if tests else None,
        pairs=tuple(_pair(row, pair) for pair in info.get("stdin_stdout") or ()),
    )


def _pair(row: int, pair: Any) -> tuple[str, str]:
    values = (pair.get("input"), pair.get("output")) if isinstance(pair, Mapping) else tuple(pair)
    match values:
        case (str(stdin), str(stdout)):
            return stdin, stdout
    raise DataError(f"Row {row}: an entry of `stdin_stdout` must be {{input: text, output: text}}, not {pair!r}.")


def score(sandbox: SandboxInterface, code: str | None, tests: CodeTests) -> CodeScore:
    """Run all tests of a program in a new session.

    Raises:
        SandboxError: A session could not be started.
    """
    if code is None:
        return CodeScore(outcome=CodeOutcome.NO_CODE, passed=0, total=tests.total)
    with sandbox.open_session() as session:
        passed, worst = 0, Outcome.OK
        if tests.assertions is not None:
            passed, worst = _assertions(session, code, tests.assertions)
        for stdin, expected in tests.pairs:
            if worst in (Outcome.TIMEOUT, Outcome.LOST):
                break  # the rest would take as long again
            result = session.run_program(code, stdin=stdin)
            worst = result.outcome if result.outcome is not Outcome.OK else worst
            passed += result.outcome is Outcome.OK and same_output(result.stdout, expected)
    outcome = CodeOutcome.PASSED if passed == tests.total else _OF_RUN.get(worst, CodeOutcome.KILLED)
    return CodeScore(outcome=outcome, passed=passed, total=tests.total)


def _assertions(session: SessionInterface, code: str, tests: SplitTests) -> tuple[int, Outcome]:
    program, nonce = harness(code, tests)
    result = session.run_program(program)
    observed = read_observations(result.stdout, nonce)
    passed = 0
    for number, condition in enumerate(tests.conditions):
        times = observed.get(number, [])
        passed += bool(times) and all(holds(condition, observations) for observations in times)
    return passed, result.outcome


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are equal, apart from white space at the ends of lines and of the text."""
    return _lines(found) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
