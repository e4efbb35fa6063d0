"""Eight ranks, one after the other, that each load their shards, run as a program by test_sharded_loading.py.

Arguments: folder of models by kind, and folder for results. The process group is torch's fake one, which moves no data.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import make_context
from rank_processes import fork_ranks

from rl_backends_base import FullyShard
from rl_backends_base.shards import local
from rl_backends_hf.model_options import HFConfig
from rl_backends_hf.scoring.scoring_model import ValueScoring
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.training.worker import load_sharded

WORLD = 8
VALUES = "values"
"""The kind that is loaded with a scalar head."""
LARGE = "large"
"""The kind whose memory is measured."""


def private_bytes() -> int:
    """Memory of this process without files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Peak:
    """The most private memory that is in use within the block."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._start, self.bytes, self._done = private_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, private_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def load(kind: str, folder: Path, parallel: FullyShard):
    """The shards of one model."""

    def make_scoring(model):
        return ValueScoring(model) if kind == VALUES else TokenScoring(model, chunk_tokens=7)

    head = "scalar" if kind == VALUES else "tokens"
    return load_sharded(str(folder), make_scoring, parallel=parallel, options=HFConfig(), dtype=torch.float32, head=head)


def work(rank: int) -> None:
    """All models on one rank."""
    models, out = map(Path, sys.argv[1:])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    parallel = FullyShard(make_context(rank, WORLD), compute_dtype=torch.bfloat16)
    found = {}
    for folder in sorted(models.iterdir(), key=lambda each: each.name != LARGE):
        with Peak() as peak:
            scoring = load(folder.name, folder, parallel)
        if folder.name == LARGE:
            held = sum(local(tensor).nbytes for tensor in scoring.state_dict().values())
            torch.save({"peak": peak.bytes, "held": held}, out / f"memory-{rank}.pt")
        else:
            buffers = dict(scoring.model.named_buffers())
            tensors = {name: local(each).clone() for name, each in scoring.model.named_parameters(remove_duplicate=False)}
            found[folder.name] = {**tensors, **buffers}
        del scoring
    torch.save(found, out / f"shards-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(WORLD, work)
