"""Conversations and a running math environment for the tests of this folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.interfaces.environment import EnvironmentReturn, Message
from rl_envs.math.environment import MathEnvironment

sys.path.insert(0, str(Path(__file__).parent))  # for `loopback_judge`


def answered(completion: str, question: str = "?") -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]


def wait_until(holds, seconds=60.0):
    """Wait for an event in another process; fails if it does not happen."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def descendants(process: int) -> list[int]:
    """Process ids of all direct and indirect children of a process."""
    try:
        children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in descendants(child)]


class MathGrader:
    """A `MathEnvironment` and the pairs (expected answer, completion) to grade."""

    def __init__(self, environment: MathEnvironment) -> None:
        self.environment = environment

    def grade(self, *pairs: tuple[str, str]) -> EnvironmentReturn:
        return self.environment.step(
            [answered(completion) for _, completion in pairs], [{"expected_answer": expected} for expected, _ in pairs]
        )


@pytest.fixture(scope="session")
def grader() -> Iterator[MathGrader]:
    environment = MathEnvironment({"num_processes": 2, "timeout_s": 1.5})
    yield MathGrader(environment)
    environment.shutdown()


@pytest.fixture(scope="session")
def lenient_grader() -> Iterator[MathGrader]:
    """Accepts answers without a box and unevaluated arithmetic, so that a comparison can run forever."""
    environment = MathEnvironment({"num_processes": 2, "timeout_s": 1.5, "require_box": False, "allow_unevaluated": True})
    yield MathGrader(environment)
    environment.shutdown()
