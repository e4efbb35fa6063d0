from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Workers are imported by name in the processes that these tests start.
sys.path.insert(0, str(Path(__file__).parent))

from rl_core.weights.shared_memory import DIRECTORY, sweep


def my_segments() -> list[str]:
    """Segments of this process and of its dead children."""
    return [path.name for path in DIRECTORY.glob(f"rlcore-{os.getpid()}-*")] + sweep()


@pytest.fixture(autouse=True)
def no_segment_is_left():
    sweep()  # what others left is not this test's
    yield
    assert my_segments() == []
