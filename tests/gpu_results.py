"""`make test-gpu`: runs the tests that need a GPU, smoke tests first, and writes the result of each to a file.

A test that does not run is listed with its reason, and the session fails: a machine without a GPU verifies nothing.
"""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

LIBRARIES = ("torch", "transformers", "vllm", "megatron-core", "ray", "flash-attn", "transformer-engine")
NOT_RUN = "not run"


class GpuResults:
    """Collects the result of each test, and writes them at the end of the session.

    Args:
        path: The file of results, as JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, dict[str, object]] = {}
        self._failed_smoke: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Smoke tests first."""
        items.sort(key=lambda item: item.get_closest_marker("smoke") is None)
        self.cases = {item.nodeid: {"outcome": NOT_RUN, "reason": "the session ended before it"} for item in items}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the other tests if a smoke test failed."""
        if self._failed_smoke is not None and item.get_closest_marker("smoke") is None:
            pytest.skip(f"the smoke test {self._failed_smoke} failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record an outcome; an error of a fixture counts as failed."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.cases[report.nodeid] = {"outcome": NOT_RUN, "reason": reason.removeprefix("Skipped: ")}
        elif report.failed:
            self.cases[report.nodeid] = {"outcome": "failed", "phase": report.when, "seconds": round(report.duration, 2)}
            if "smoke" in report.keywords:
                self._failed_smoke = report.nodeid
        elif report.when == "call":
            self.cases[report.nodeid] = {"outcome": "passed", "seconds": round(report.duration, 2)}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; a session in which a test did not run fails."""
        self.path.write_text(json.dumps({**machine(), "cases": self.cases}, indent=1) + "\n")
        if any(case["outcome"] == NOT_RUN for case in self.cases.values()) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many tests ran, and each that did not."""
        outcomes = [case["outcome"] for case in self.cases.values()]
        terminalreporter.section("GPU tests")
        for case, result in self.cases.items():
            if result["outcome"] == NOT_RUN:
                terminalreporter.line(f"not run: {case} ({result['reason']})")
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", NOT_RUN))
        terminalreporter.line(f"{counts}; written to {self.path}")


def machine() -> dict[str, object]:
    """Commit, GPUs and versions of the libraries."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    devices = range(torch.cuda.device_count())
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "gpus": [
            {"name": properties.name, "bytes": properties.total_memory, "capability": f"{properties.major}.{properties.minor}"}
            for properties in map(torch.cuda.get_device_properties, devices)
        ],
        "cuda": torch.version.cuda,
        "libraries": {name: installed for name in LIBRARIES if (installed := installed_version(name)) is not None},
    }


def installed_version(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
