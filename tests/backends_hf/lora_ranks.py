"""Two ranks that train adapters together, run as a program by test_lora.py, which compares the output.

Arguments: the model's folder, folder for results, port.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks

from rl_backends_hf.training.worker import HFPolicyWorker

FIELDS = {"hf": {"lora": {"rank": 4}}, "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}, "max_grad_norm": None}


def work(rank: int) -> None:
    """Three steps of one rank, and a checkpoint."""
    model, out, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    # Ranks with different generators must still start with the same adapters.
    torch.manual_seed(rank)
    worker = HFPolicyWorker(make_context(rank, 2, port), make_config(model, **FIELDS))
    worker.setup()
    rows = make_rows()
    shard = rows.shard_by_batch_size(2)[rank]
    norms = [worker.train(shard, NLL(), counts=counts_of(rows))[0].grad_norm for _ in range(3)]
    worker.save_checkpoint(out / "two" / "w", out / "two" / "o")
    weights = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    torch.save({"norms": norms, "weights": weights}, out / f"rank-{rank}.pt")
    worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, work)
