"""One or two ranks that train with 8-bit AdamW, run as a program by test_quantized_optimizer.py, which compares the output.

Arguments: folder of a model, folder for results, number of ranks, and a free port for each worker to be.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles each step, which takes a minute
import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import CheckpointError

# Transformers imports torchao if it finds it, so it is found only from here on; see Makefile.
sys.path.append(os.path.join(sys.prefix, "torchao"))

WORLD = int(sys.argv[3])
SCHEDULER = {"name": "linear", "kwargs": {"num_warmup_steps": 4, "num_training_steps": 20}}


def worker_of(rank: int, port: int, name: str, lr: float = 1e-2, lora=None, **fields) -> HFPolicyWorker:
    optimizer = {"name": name, "kwargs": {"lr": lr}}
    hf = {"data_parallel": "fsdp2" if WORLD > 1 else "replicate", "lora": lora}
    config = make_config(sys.argv[1], hf=hf, optimizer=optimizer, scheduler=SCHEDULER, train_micro_batch_size=2, **fields)
    worker = HFPolicyWorker(make_context(rank, WORLD, port), config)
    worker.setup()
    return worker


def state_of(worker: HFPolicyWorker) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of this rank."""
    trained = {name: tensor.clone() for name, tensor in worker.trained_weights()}
    return trained | {str(number): tensor.clone() for number, tensor in enumerate(worker.state.tensors())}


def adapter_steps(rank: int, port: int, shard, counts, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """State after two steps that two ranks take and one rank loads, and the losses of two more steps."""
    worker = worker_of(rank, port, "torchao.optim.AdamW8bit", lora={"rank": 64})
    if WORLD == 1:
        worker.load_checkpoint(folder / "weights", folder / "optimizer")
    else:
        for _ in range(2):
            worker.train(shard, NLL(), counts=counts)
        worker.save_checkpoint(folder / "weights", folder / "optimizer")
    state = state_of(worker)
    losses = [worker.train(shard, NLL(), counts=counts)[0].loss for _ in range(2)]
    worker.shutdown()
    return state, losses


def work(rank: int) -> None:
    """Steps without and with an interruption, for each precision; bytes of the state; other numbers of shards."""
    out, ports = Path(sys.argv[2]), iter(map(int, sys.argv[4:]))
    rows = make_rows()
    shard, counts = rows.shard_by_batch_size(WORLD)[rank], counts_of(rows)
    found: dict[str, object] = {}

    def steps(worker: HFPolicyWorker, number: int) -> list[tuple[float, float]]:
        results = [worker.train(shard, NLL(), counts=counts)[0] for _ in range(number)]
        return [(result.loss, result.lr) for result in results]

    for precision in ("float32", "bfloat16"):
        folder = out / f"{precision}-{WORLD}"
        worker = worker_of(rank, next(ports), "torchao.optim.AdamW8bit", precision=precision)
        worker.save_checkpoint(folder / "first-weights", folder / "first")
        beginning = state_of(worker)
        steps(worker, 2)
        worker.save_checkpoint(folder / "weights", folder / "optimizer")
        straight = (steps(worker, 3), state_of(worker))
        worker.load_checkpoint(folder / "first-weights", folder / "first")
        found[precision, "first"] = (beginning, state_of(worker))
        worker.shutdown()
        worker = worker_of(rank, next(ports), "torchao.optim.AdamW8bit", precision=precision)
        worker.load_checkpoint(folder / "weights", folder / "optimizer")
        found[precision, "resumed"] = (straight, (steps(worker, 3), state_of(worker)))
        found["bytes"] = sum(tensor.nbytes for tensor in worker.tensors_by_kind()["optimizer state"])
        found["weights"] = sum(tensor.numel() for _, tensor in worker.trained_weights())
        found["finite"] = worker.find_non_finite()
        worker.shutdown()
    worker = worker_of(rank, next(ports), "torchao.optim.AdamW8bit", lr=3e-2)
    worker.load_checkpoint(out / f"float32-{WORLD}" / "weights", out / f"float32-{WORLD}" / "optimizer")
    found["changed"] = steps(worker, 3)
    worker.shutdown()
    for name in ("torch.optim.AdamW", "torchao.optim.AdamW8bit"):
        worker = worker_of(rank, next(ports), name)
        found[name] = steps(worker, 6)
        worker.shutdown()
    found["lora"] = adapter_steps(rank, next(ports), shard, counts, out / "lora")
    if WORLD == 1:
        worker = worker_of(rank, 0, "torchao.optim.AdamW8bit")
        try:
            worker.load_training_state(out / "float32-2" / "optimizer")
        except CheckpointError as error:
            found["refused"] = str(error)
    torch.save(found, out / f"{WORLD}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(WORLD, work)
