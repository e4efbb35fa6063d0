"""Test suites with classes, exceptions, generators, callbacks, changed arguments and many calls are graded right.

Each suite has a right program, which must pass, and a wrong one, which must not. Tests and program are in different
processes, so every suite is about something that has to cross between them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from isolation import isolated

from rl_envs.code.environment import CodeEnvironment

from .conftest import answered

_TEXT = "\n" + Path(__file__).with_name("code_suites.txt").read_text("utf-8")
SUITES = {
    name: re.split(r"\n--- (?:right|wrong)\n", suite)
    for name, _, suite in (section.strip("\n").partition("\n") for section in _TEXT.split("\n=== ")[1:])
}
"""By name: tests, a right program and a wrong one."""


@pytest.fixture(scope="module")
def outcomes():
    with isolated():
        environment = CodeEnvironment({"max_concurrency": 3, "sandbox": {"timeout_s": 60.0}})
    rows = [(name, kind, suite[0], suite[1 + kind]) for name, suite in SUITES.items() for kind in (0, 1)]
    try:
        result = environment.step(
            [answered(f"```python\n{code}\n```") for *_, code in rows], [{"tests": row[2]} for row in rows]
        )
    finally:
        environment.shutdown()
    assert result.scored.all(), result.failures
    return {row[:2]: info["code_outcome"] for row, info in zip(rows, result.metadata, strict=True)}


def test_there_are_at_least_forty_suites():
    assert len(SUITES) >= 40
    assert all(len(suite) == 3 for suite in SUITES.values())


@pytest.mark.parametrize("name", SUITES)
def test_the_right_program_passes_and_the_wrong_one_does_not(outcomes, name):
    assert outcomes[name, 0] == "passed"
    assert outcomes[name, 1] in ("failed", "error")
