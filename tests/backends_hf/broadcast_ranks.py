"""Ranks of an FSDP2 policy that send their weights, run as a program by test_broadcast.py.

Arguments: folder for results, and for each launch `RANKS:BUDGET:PORT:PORT:FOLDER` with the model's folder.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from broadcasts import broadcast
from conftest import NLL, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks
from recorded_collectives import calls_of_methods

from rl_backends_hf.training.worker import HFPolicyWorker


def work(rank: int, *, world: int, budget: int, ports: tuple[int, int], model: str, out: Path) -> None:
    """One refit of one rank."""
    worker = HFPolicyWorker(make_context(rank, world, ports[0]), make_config(model, hf={"data_parallel": "fsdp2"}))
    worker.setup()
    found = broadcast(worker, budget_bytes=budget, port=ports[1])
    found["fingerprint"] = worker.weight_fingerprint()
    rows = make_rows()
    shard = rows.shard_by_batch_size(world)[rank]
    found["methods"] = calls_of_methods(worker, shard, NLL(), counts_of(rows), out / Path(model).name)
    torch.save(found, out / f"{Path(model).name}-{rank}.pt")
    worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for launch in sys.argv[2:]:
        world, budget, first, second, model = launch.split(":", 4)
        fork_ranks(
            int(world),
            partial(
                work,
                world=int(world),
                budget=int(budget),
                ports=(int(first), int(second)),
                model=model,
                out=Path(sys.argv[1]),
            ),
        )
