"""Two ranks that train adapters together, run as a program by test_lora_ranks.py, which compares the output.

Arguments: folder of models by kind, folder for results, a port for each case.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, VALUE_FIELDS, SquaredValues, counts_of, make_config, make_context, make_rows
from rank_processes import fork_ranks

from rl_backends_base.shards import local
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker

GENERATION = {"backend": "hf", "max_new_tokens": 4, "lora": "adapter"}
CASES = {
    "replicate": {"kind": "qwen2", "hf": {"data_parallel": "replicate"}},
    "fsdp2": {"kind": "qwen2", "hf": {"data_parallel": "fsdp2"}},
    "unmerged": {
        "kind": "llama-tied",
        "hf": {"data_parallel": "fsdp2"},
        "precision": "bfloat16",
        "generation": GENERATION,
        "activation_checkpointing": True,
    },
    "values": {"kind": "value", "hf": {"data_parallel": "fsdp2"}, "precision": "bfloat16", "head": "scalar"},
    "experts": {
        "kind": "mixture",
        "hf": {"data_parallel": "fsdp2"},
        "generation": GENERATION,
        "lora": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    },
}


def config_of(models: Path, case: str) -> HFPolicyConfig:
    """The section of a case; one row in a microbatch, so that rows round in the same way on any number of ranks."""
    fields = {**VALUE_FIELDS, "head": "tokens", **CASES[case], "train_micro_batch_size": 1, "logprob_batch_size": 1}
    fields["hf"] = {**fields["hf"], "lora": {"rank": 4, **fields.pop("lora", {})}}
    fields["optimizer"] = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05, "momentum": 0.9}}
    return make_config(str(models / fields.pop("kind")), **fields)


def make_worker(models: Path, case: str, rank: int, world: int, port: int = 0) -> HFPolicyWorker:
    """A worker of a case."""
    worker = HFPolicyWorker(make_context(rank, world, port), config_of(models, case))
    worker.setup()
    return worker


def results_of(worker: HFPolicyWorker, rows, counts, folder: Path) -> dict[str, object]:
    """Two steps from the checkpoint that is loaded, what the worker then has and sends, and two more steps after a save."""
    loss = SquaredValues() if worker.config.head == "scalar" else NLL()
    found: dict[str, object] = {"steps": [], "after": []}

    def train(key: str) -> None:
        result = worker.train(rows, loss, counts=counts)[0]
        found[key].append((result.loss, result.grad_norm))

    for key in ("steps", "steps"):
        train(key)
    if worker.config.head == "scalar":
        found["scores"] = worker.get_values(rows)["values"]
    else:
        found["scores"] = worker.get_logprobs(rows)["logprobs"]
        found["reference"] = worker.get_logprobs(rows, reference=True)["logprobs"]
    found["sent"] = {name: tensor.clone() for name, tensor in worker.iter_weights()}
    adapters = [name for name in found["sent"] if ".lora_" in name]
    found["adapters"] = {name: tensor.clone() for name, tensor in worker.iter_weights(adapters)}
    found["manifest"] = worker.weight_manifest()
    found["sample"] = worker.weight_sample(whole=True)
    trained = dict(worker.trained_weights())
    found["trained"] = {name: tensor.detach().clone() for name, tensor in trained.items()}
    found["frozen"] = sum(local(each).numel() for each in worker.model.parameters() if not each.requires_grad)
    held = {"weights": worker.model.parameters(), "optimizer state": worker.tensors_by_kind()["optimizer state"]}
    found["held"] = {kind: sum(local(each).nbytes for each in tensors) for kind, tensors in held.items()}
    worker.save_checkpoint(folder / "w", folder / "o")
    train("after")
    worker.load_checkpoint(folder / "w", folder / "o")
    train("after")
    found["version"] = worker.get_weight_version()
    return found


def work(rank: int) -> None:
    """All cases on one rank."""
    models, out, ports = Path(sys.argv[1]), Path(sys.argv[2]), map(int, sys.argv[3:])
    # Ranks with different generators must still start with the same adapters.
    torch.manual_seed(rank)
    for case, port in zip(CASES, ports, strict=True):
        worker = make_worker(models, case, rank, 2, port)
        worker.load_checkpoint(out / case / "one" / "w", out / case / "one" / "o")
        rows = make_rows()
        found = results_of(worker, rows.shard_by_batch_size(2)[rank], counts_of(rows), out / case / "two")
        torch.save(found, out / f"{case}-{rank}.pt")
        worker.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, work)
