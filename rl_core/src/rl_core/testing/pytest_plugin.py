"""Conformance tests in pytest: the option `--ray`, a summary of kept promises, and a run of one test class for a command."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from rl_core.testing.promises import Conformance, PromiseResult

_SUMMARIES = pytest.StashKey[list[str]]()
_UNUSED = ("terminal", "logging", "warnings", "cacheprovider", "faulthandler", "unraisableexception", "threadexception")
"""Plugins of pytest that print, write, or change what a component and the command around it do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ray`."""
    group = parser.getgroup("rlcore")
    group.addoption("--ray", action="store_true", help="conformance tests: run workers on two ranks over Ray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the test classes where workers run."""
    if any(_tests_of(item) is not None for item in items):
        from rl_core.testing.promises import Conformance

        Conformance.uses_ray = bool(config.getoption("--ray"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep the summary of a class when its last test has run."""
    tests = _tests_of(item)
    if tests is not None and (nextitem is None or _tests_of(nextitem) is not tests):
        item.config.stash.setdefault(_SUMMARIES, []).append(tests.summary())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each tested component."""
    lines = terminalreporter.config.stash.get(_SUMMARIES, [])
    if lines:
        terminalreporter.write_sep("=", "conformance")
        for line in lines:
            terminalreporter.write_line(line)


def _tests_of(item: pytest.Item) -> Any:
    """The conformance class of a test, or None; imports nothing for the tests of others."""
    tests = getattr(item, "cls", None)
    return tests if tests is not None and hasattr(tests, "failure_text") and hasattr(tests, "promises") else None


def results_of(tests: type[Conformance[Any]]) -> list[PromiseResult]:
    """Run a test class in this process, without output and without the settings and plugins of the working directory.

    Raises:
        Exception: the component could not be shut down, and no promise is broken.
    """
    run = _OneClass(tests)
    arguments = [
        "-c",
        os.devnull,
        "--assert=plain",
        "--capture=no",
        *(word for name in _UNUSED for word in ("-p", f"no:{name}")),
    ]
    with patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}):
        code = pytest.main(arguments, plugins=[run])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if run.error is not None:
        raise run.error
    return [*tests.results.values()]


class _OneClass:
    """Plugin of pytest that collects one class, which no file needs to contain."""

    def __init__(self, tests: type[Conformance[Any]]) -> None:
        self.tests = tests
        self.error: BaseException | None = None

    def pytest_collection(self, session: pytest.Session) -> bool:
        module = pytest.Module.from_parent(session, path=session.path)
        module.obj = SimpleNamespace(Tests=self.tests)
        session.items = [*session.genitems(pytest.Class.from_parent(module, name="Tests"))]
        session.testscollected = len(session.items)
        return True

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and call.when != "call":
            self.error = call.excinfo.value
