"""Profiling of single steps."""

import gzip
from contextlib import suppress

import pytest
import torch

from rl_core.errors import ConfigError
from rl_train.config.schema import ProfilingConfig
from rl_train.metrics.measured import profiled


def test_only_the_chosen_steps_are_profiled(tmp_path):
    for step in (2, 3):
        with profiled(step, ProfilingConfig(steps=[3]), tmp_path):
            torch.mm(torch.ones(3, 3), torch.ones(3, 3))
    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "step_000003.json.gz"
    assert b"aten::mm" in gzip.decompress(trace.read_bytes())


def test_memory_is_not_recorded_without_a_gpu(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"profiling.memory records the memory of a GPU, but torch .* finds none"),
        profiled(3, ProfilingConfig(steps=[3], memory=True), tmp_path),
    ):
        pass


def test_the_allocations_of_a_chosen_step_are_written_also_if_it_fails(tmp_path, monkeypatch):
    # torch's recorder exists only in builds for GPUs; this shows when it is called.
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    for step in (2, 3):
        with suppress(MemoryError), profiled(step, ProfilingConfig(steps=[3], memory=True), tmp_path):
            calls.append(step)
            raise MemoryError
    assert calls == [2, "all", 3, str(tmp_path / "profile" / "memory_000003.pickle"), None]
