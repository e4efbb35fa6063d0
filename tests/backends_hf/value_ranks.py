"""Two ranks that train a scalar head together, run as a program by test_scalar_head.py, which compares the output.

Arguments: the model's folder, folder for results, a port for each way of sharing the model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import VALUE_FIELDS, SquaredValues, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks

from rl_backends_hf.training.worker import HFPolicyWorker


def work(rank: int) -> None:
    """Steps and a checkpoint of one rank, for each way of sharing the model."""
    model, out, ports = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    # Ranks with different generators must still start with the same head.
    torch.manual_seed(rank)
    for mode, port in zip(("replicate", "fsdp2"), ports, strict=True):
        worker = HFPolicyWorker(make_context(rank, 2, port), make_config(model, hf={"data_parallel": mode}, **VALUE_FIELDS))
        worker.setup()
        rows = make_rows()
        shard = rows.shard_by_batch_size(2)[rank]
        norms = [worker.train(shard, SquaredValues(), counts=counts_of(rows))[0].grad_norm for _ in range(3)]
        values = worker.get_values(shard)["values"]
        worker.save_checkpoint(out / mode / "w", out / mode / "o")
        worker.load_checkpoint(out / mode / "w", out / mode / "o")
        after = worker.train(shard, SquaredValues(), counts=counts_of(rows))[0].grad_norm
        torch.save({"norms": [*norms, after], "values": values}, out / f"{mode}-{rank}.pt")
        worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, work)
