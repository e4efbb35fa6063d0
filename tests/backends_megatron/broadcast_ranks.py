"""Ranks of a Megatron policy that send their weights, run as a program by test_broadcast.py.

Arguments: folder for results, and for each launch `LAYOUT:BUDGET:PORT:PORT:FOLDER` with the model's folder.
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
from megatron_cases import NLL, counts_of, make_context, make_rows
from rank_processes import fork_ranks
from recorded_collectives import calls_of_methods
from transformers import AutoConfig

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.policy import grid
from rl_backends_megatron.worker import MegatronPolicyWorker

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "ep2": (2, EP2),
    "tp2-pp2": (4, {**TP2, "sequence_parallel": True, **PP2}),
    "tp2-ep2": (4, {**TP2, "sequence_parallel": True, **EP2}),
    "tp3": (3, {"tensor_model_parallel_size": 3}),
}
"""Number of ranks, and how they divide the model."""


def work(rank: int, *, layout: str, budget: int, ports: tuple[int, int], model: str, out: Path) -> None:
    """One refit of one rank."""
    world, megatron = LAYOUTS[layout]
    config = MegatronPolicyConfig(model_name=model, megatron_cfg=MegatronConfig(**megatron))
    worker = MegatronPolicyWorker(make_context(rank, world, ports[0]), config)
    worker.setup()
    found = broadcast(worker, budget_bytes=budget, port=ports[1])
    found["fingerprint"] = worker.weight_fingerprint()
    rows = make_rows()
    named = grid(config.megatron_cfg, world)
    shard = rows.shard_by_batch_size(named.get_axis_size("data"))[named.get_worker_coords(rank)["data"]]
    found["methods"] = calls_of_methods(worker, shard, NLL(), counts_of(rows), out / f"{layout}-{Path(model).name}")
    torch.save(found, out / f"{layout}-{Path(model).name}-{rank}.pt")
    worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for launch in sys.argv[2:]:
        layout, budget, first, second, model = launch.split(":", 4)
        AutoConfig.from_pretrained(model)  # imports what otherwise every rank would import
        fork_ranks(
            LAYOUTS[layout][0],
            partial(
                work, layout=layout, budget=int(budget), ports=(int(first), int(second)), model=model, out=Path(sys.argv[1])
            ),
        )
