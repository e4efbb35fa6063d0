from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

# Workers are imported by name in the processes that these tests start.
sys.path.insert(0, str(Path(__file__).parent))

from rl_core.weights.shared_memory import DIRECTORY, Segment, sweep


def my_segments() -> list[str]:
    """Segments of this process without a living owner, and those of its dead children."""
    gc.collect()
    owned = {found.name for found in gc.get_objects() if isinstance(found, Segment)}
    found = {path.name for path in DIRECTORY.glob(f"rlcore-{os.getpid()}-*")}
    return [*sorted(found - owned), *sweep()]


@pytest.fixture(autouse=True)
def no_segment_is_left():
    sweep()  # what others left is not this test's
    yield
    assert my_segments() == []
