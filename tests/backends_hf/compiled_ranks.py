"""Two ranks that train a sharded model with compiled layers, run as a program by test_compiled_layers.py.

Arguments: folder of a model, folder for results, other fields of the policy as JSON, and a free port for each worker to be.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, SGD, counts_of, make_config, make_context, make_prompt_rows
from rank_processes import fork_ranks

from rl_backends_hf.training.worker import HFPolicyWorker

WORLD = 2


def worker_of(rank: int, port: int, *, compiled: bool) -> HFPolicyWorker:
    config = make_config(
        sys.argv[1],
        hf={"data_parallel": "fsdp2", "compile_layers": compiled},
        optimizer=SGD,
        max_grad_norm=None,
        train_micro_batch_size=3,
        **json.loads(sys.argv[3]),
    )
    worker = HFPolicyWorker(make_context(rank, WORLD, port), config)
    worker.setup()
    return worker


def graphs_after_rows(rank: int, worker: HFPolicyWorker, seed: int) -> int:
    """Number of compiled graphs after scoring and a step without gradient on rows of other numbers and lengths."""
    rows = make_prompt_rows(num_prompts=seed + 2, seed=seed)
    rows["weights"] = torch.zeros_like(rows["weights"])
    shard = rows.shard_by_batch_size(WORLD)[rank]
    worker.get_logprobs(shard)
    worker.train(shard, NLL(), counts=counts_of(rows))
    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs


def work(rank: int) -> None:
    """Log-probabilities and one step under SGD without and with compiled layers."""
    out, ports = Path(sys.argv[2]), iter(map(int, sys.argv[4:]))
    rows = make_prompt_rows(num_prompts=4)
    shard = rows.shard_by_batch_size(WORLD)[rank]
    found: dict[str, object] = {}
    for name in ("plain", "compiled"):
        worker = worker_of(rank, next(ports), compiled=name == "compiled")
        found[f"{name} graphs"] = [graphs_after_rows(rank, worker, seed) for seed in (1, 2, 3)]
        logprobs = worker.get_logprobs(shard)["logprobs"]
        before = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        norm = worker.train(shard, NLL(), counts=counts_of(rows))[0].grad_norm
        after = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        found[name] = {"logprobs": logprobs, "before": before, "after": after, "norm": norm}
        worker.shutdown()
    torch.save(found, out / f"rank-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(WORLD, work)
