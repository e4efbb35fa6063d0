"""Profiling of single steps."""

import gzip

import torch

from rl_train.config.schema import ProfilingConfig
from rl_train.profiling import profiled


def test_only_the_chosen_steps_are_profiled(tmp_path):
    for step in (2, 3):
        with profiled(step, ProfilingConfig(steps=[3]), tmp_path):
            torch.mm(torch.ones(3, 3), torch.ones(3, 3))
    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "step_000003.json.gz"
    assert b"aten::mm" in gzip.decompress(trace.read_bytes())
