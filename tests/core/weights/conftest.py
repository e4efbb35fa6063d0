from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

import pytest

# Workers are imported by name in the processes that these tests start.
sys.path.insert(0, str(Path(__file__).parent))

from shared_segments import own_processes, segments_of

from rl_core.weights.shared_memory import Segment


@pytest.fixture(scope="module", autouse=True)
def living_segments():
    """Segments of this process that something still owns. Collecting garbage for each test would take seconds."""
    made: weakref.WeakSet[Segment] = weakref.WeakSet()
    create = Segment.__init__

    def create_and_record(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "__init__", create_and_record)
        yield made


@pytest.fixture(autouse=True)
def no_segment_is_left(living_segments):
    """No segment of this process without an owner, and none of its descendants that ended in the test."""
    before = own_processes()
    yield
    owned = {segment.name for segment in living_segments}
    found = set(segments_of(os.getpid()))
    assert [*sorted(found - owned), *segments_of(*before - own_processes())] == []
