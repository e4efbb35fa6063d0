"""Shared-memory segments: nothing remains in /dev/shm, however the owning process ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_core.errors import WeightSyncError
from rl_core.weights import shared_memory
from rl_core.weights.shared_memory import DIRECTORY, MappedSegments, Segment, map_segment, sweep
from rl_core.weights.source import BufferPair

OWNER = """
import sys
import time
from pathlib import Path
from rl_core.weights import shared_memory
shared_memory.DIRECTORY = Path(sys.argv[1])
segment = shared_memory.Segment(1000)
segment.buffer.fill_(7)
print(segment.name, flush=True)
{then}
"""


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def owner(then: str, directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a segment. In `DIRECTORY`, other processes of the machine may sweep it as soon as this one has ended."""
    command = [sys.executable, "-c", OWNER.format(then=then), str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, directory / process.stdout.readline().strip()


def test_another_process_reads_what_was_written_and_cannot_change_it():
    process, path = owner("time.sleep(600)", DIRECTORY)
    mapped = map_segment(path.name)
    assert torch.equal(mapped, torch.full((1000,), 7, dtype=torch.uint8))
    mapped.zero_()
    assert torch.equal(map_segment(path.name), torch.full((1000,), 7, dtype=torch.uint8))
    process.kill()
    process.wait()
    sweep()
    assert not path.exists()


def test_a_segment_of_a_living_process_is_not_swept_and_one_of_a_killed_process_is(own_directory):
    process, path = owner("time.sleep(600)", own_directory)
    assert sweep() == []
    assert path.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert path.exists()
    assert sweep() == [path.name]
    assert not path.exists()


def test_a_mapped_segment_is_mapped_again_only_if_it_is_another_one_of_that_name(own_directory):
    segments, one = MappedSegments(), Segment(100)
    one.buffer.fill_(1)
    mapped = segments.map(one.name, size=100)
    one.buffer.fill_(2)
    again = segments.map(one.name, size=50)
    assert again.data_ptr() == mapped.data_ptr()
    assert again.unique().tolist() == [2]
    (own_directory / "other").write_bytes(bytes([3]) * 200)
    os.replace(own_directory / "other", own_directory / one.name)  # as after a process with the same pid
    assert segments.map(one.name, size=200).unique().tolist() == [3]
    with pytest.raises(WeightSyncError, match="is not on this node"):
        segments.map("rlcore-0-0", size=1)
    one.close()


def test_small_segments_are_kept_for_the_next_refit_and_large_ones_are_not(own_directory):
    pair = BufferPair(Segment)
    large, small = pair.next(5000), pair.next(10)
    pair.keep(100)
    assert [path.name for path in own_directory.iterdir()] == [small.name]
    assert pair.next(10) is not large
    assert pair.next(10) is small
    pair.close()
    assert list(own_directory.iterdir()) == []


FULL = pytest.mark.full("a process that ends by an error, and one that is killed, run in CI")


@pytest.mark.slow
@pytest.mark.parametrize(
    "then", [pytest.param("", marks=FULL), pytest.param("raise SystemExit(3)", marks=FULL), "raise RuntimeError"]
)
def test_a_process_that_ends_by_itself_leaves_no_segment(then, tmp_path):
    process, path = owner(then, tmp_path)
    process.wait()
    assert not path.exists()


def test_a_segment_that_is_forgotten_is_unlinked():
    segment = Segment(10)
    path = segment.path
    del segment
    gc.collect()
    assert not path.exists()


def test_mapped_bytes_outlive_the_unlinking():
    segment = Segment(10)
    segment.buffer.fill_(3)
    mapped = map_segment(segment.name)
    segment.close()
    segment.close()
    del segment
    gc.collect()
    assert mapped.tolist() == [3] * 10


def test_a_segment_name_contains_its_owner():
    segment = Segment(1)
    assert segment.name.startswith(f"rlcore-{os.getpid()}-")
    segment.close()


def test_a_forked_child_that_ends_does_not_unlink_its_parents_segment():
    segment = Segment(10)
    child = os.fork()
    if child == 0:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert segment.path.exists()
    segment.close()


def test_two_segments_alternate_and_grow_as_needed():
    pair = BufferPair(Segment)
    first, second, third = pair.next(100), pair.next(100), pair.next(50)
    assert first is third
    assert first is not second
    larger = pair.next(200)
    assert larger.size == 200
    assert not second.path.exists()
    pair.close()
    assert not first.path.exists()


def test_too_little_shared_memory_is_reported_before_writing():
    with pytest.raises(WeightSyncError, match="--shm-size"):
        Segment(1 << 60)


def test_a_segment_of_another_node_is_reported_as_missing():
    with pytest.raises(WeightSyncError, match="not on this node"):
        map_segment("rlcore-1-0-of-another-node")
