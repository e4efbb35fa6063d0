"""Support of pytest for the conformance kit: the option `--ray`, short failures, and a summary of kept promises."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ray`."""
    group = parser.getgroup("rlcore")
    group.addoption("--ray", action="store_true", help="conformance tests: run workers on two ranks over Ray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the test classes where workers run."""
    if any(_tests_of(item) is not None for item in items):
        from rl_core.testing.promises import Conformance

        Conformance.uses_ray = bool(config.getoption("--ray"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show a broken promise by its text alone, and an expected failure as one."""
    outcome = yield
    if call.excinfo is None or _tests_of(item) is None:
        return
    from rl_core.testing.promises import ExpectedFailureError, NotKeptError

    report, error = outcome.get_result(), call.excinfo.value
    if isinstance(error, NotKeptError):
        report.longrepr = str(error)
    elif isinstance(error, ExpectedFailureError):
        report.outcome, report.wasxfail = "skipped", str(error)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each tested component."""
    lines = terminalreporter.config.stash.get(_SUMMARIES, [])
    if lines:
        terminalreporter.write_sep("=", "conformance")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep the summary of a class when its last test has run."""
    tests = _tests_of(item)
    if tests is not None and (nextitem is None or _tests_of(nextitem) is not tests):
        item.config.stash.setdefault(_SUMMARIES, []).append(tests.summary())


_SUMMARIES = pytest.StashKey[list[str]]()


def _tests_of(item: pytest.Item) -> Any:
    """The conformance class of a test, or None; imports nothing for the tests of others."""
    tests = getattr(item, "cls", None)
    return tests if tests is not None and hasattr(tests, "failure_text") and hasattr(tests, "promises") else None
