"""Four ranks that train together, run as a program by test_hybrid_shards.py.

Arguments: folder of a model, folder for results, and a free port for each worker to be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, SGD, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks
from recorded_collectives import RecordedCollectives

from rl_backends_hf.training.worker import HFPolicyWorker

WORLD = 4
SMALL_STEPS = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}
ADAM = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}


def worker_of(rank: int, port: int, **fields) -> HFPolicyWorker:
    hf = {"data_parallel": "fsdp2", **fields.pop("hf")}
    config = make_config(sys.argv[1], hf=hf, max_grad_norm=None, train_micro_batch_size=1, **fields)
    worker = HFPolicyWorker(make_context(rank, WORLD, port), config)
    worker.setup()
    return worker


def gathers_before_layers(rank: int, port: int, prefetched: int, rows) -> list[int]:
    """How many all-gathers a forward pass has started when each decoder layer computes."""
    worker = worker_of(rank, port, hf={"fsdp_prefetched_layers": prefetched}, logprob_batch_size=8)
    counts: list[int] = []
    with RecordedCollectives() as recorded:
        for layer in worker.model.model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_: counts.append(len(recorded.calls)))
        worker.get_logprobs(rows)
    worker.shutdown()
    return counts


def work(rank: int) -> None:
    """The gradients of one step with two copies of two shards, a resumed checkpoint, and collectives with prefetching."""
    out, ports = Path(sys.argv[2]), iter(map(int, sys.argv[3:]))
    rows = make_rows()
    shard = rows.shard_by_batch_size(WORLD)[rank]
    found: dict[str, object] = {}
    worker = worker_of(rank, next(ports), hf={"fsdp_num_shards": 2}, optimizer=SGD)
    before = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    found["norm"] = worker.train(shard, NLL(), counts=counts_of(rows))[0].grad_norm
    found["after"] = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    found["before"] = before
    found["sample"] = worker.weight_sample(whole=True)
    found["held"] = sum(parameter.to_local().numel() for parameter in worker.model.parameters())
    worker.shutdown()
    worker = worker_of(rank, next(ports), hf={"fsdp_num_shards": 2}, optimizer=ADAM)
    worker.train(shard, NLL(), counts=counts_of(rows))
    worker.save_checkpoint(out / "w", out / "o")
    found["continued"] = [worker.train(shard, NLL(), counts=counts_of(rows))[0].loss for _ in range(2)]
    worker.load_checkpoint(out / "w", out / "o")
    found["resumed"] = [worker.train(shard, NLL(), counts=counts_of(rows))[0].loss for _ in range(2)]
    worker.shutdown()
    worker = worker_of(rank, next(ports), hf={"fsdp_num_shards": 2, "lora": {"rank": 4}}, optimizer=SMALL_STEPS)
    found["lora"] = [worker.train(shard, NLL(), counts=counts_of(rows))[0].grad_norm for _ in range(3)]
    found["lora sample"] = worker.weight_sample(whole=True)
    worker.shutdown()
    found["gathered"] = [gathers_before_layers(rank, next(ports), layers, shard) for layers in (0, 1)]
    torch.save(found, out / f"rank-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(WORLD, work)
