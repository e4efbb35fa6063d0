"""Ranks that train adapters together, run as a program; test_lora_ranks.py compares the output.

Arguments: folder of models by kind, with an adapter of each next to it; folder for results, and for each launch
`RANKS=JOB,JOB...`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from megatron_cases import FLAT_ADAM, NLL, SGD, SquaredError, counts_of, make_rows
from megatron_layouts import LAYOUTS, STEPS, TRAINING, Layout
from megatron_ranks import Rank
from rank_processes import fork_ranks
from transformers import AutoConfig

SAVED = "tp2-dp2-distributed"
"""The layout whose checkpoint others resume."""
RESUMED = ("one-distributed", SAVED)


def with_adapters(layout: Layout, **lora) -> Layout:
    """The layout with adapters in all linear layers."""
    return Layout(
        layout.kind, layout.world, {**layout.megatron, "lora": {"rank": 4, "alpha": 8, **lora}}, layout.form, layout.fields
    )


class LoraRank(Rank):
    """The work of this process in each layout."""

    def run(self, name: str) -> None:
        """Scores, one gradient, some steps, both kinds of refit; for the layouts of a checkpoint also its third step."""
        layout = with_adapters(LAYOUTS[name], adapter_path=str(self.models / f"{LAYOUTS[name].kind}-adapter"))
        one = FLAT_ADAM if layout.megatron.get("use_distributed_optimizer") else SGD
        rows, found = make_rows(), {}
        fields = {"max_grad_norm": None, "train_micro_batch_size": 3, "generation": {"backend": "hf", "lora": "adapter"}}
        worker = self.worker(layout, optimizer=one, **fields)
        shard, found["order"] = self.shard(layout, rows)
        found["facts"], found["manifest"] = self.facts, worker.weight_manifest()
        found["logprobs"] = worker.get_logprobs(shard)["logprobs"]
        found["reference"] = worker.get_logprobs(shard, reference=True)["logprobs"]
        found["before"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        found["step"] = worker.train(shard, NLL(), counts=counts_of(rows))[0]
        found["after"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.shutdown()
        worker = self.worker(layout, **TRAINING)
        found["steps"] = [self.step(worker, layout, number) for number in range(STEPS)]
        found["merged"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.save_checkpoint(self.out / name / "w", None)
        worker.shutdown()
        torch.save(found, self.out / f"{name}-{self.rank}.pt")
        if name == SAVED:
            self.save_and_continue(name)

    def values(self, name: str) -> None:
        """New adapters and the scalar head of the model: steps, and checkpoints before and after them."""
        layout, rows = with_adapters(LAYOUTS[name]), make_rows()
        worker = self.worker(layout, **TRAINING)
        shard, order = self.shard(layout, rows)
        worker.save_checkpoint(self.out / name / "initial", None)
        for _ in range(STEPS):
            worker.train(shard, SquaredError(), counts=counts_of(rows))
        found = {"order": order, "values": worker.get_values(shard)["values"]}
        worker.save_checkpoint(self.out / name / "w", None)
        worker.shutdown()
        torch.save(found, self.out / f"{name}-{self.rank}.pt")

    def save_and_continue(self, name: str) -> None:
        """A new adapter; two steps, a checkpoint, and the third step of a run that is not interrupted."""
        for precision in ("float32", "bfloat16"):
            folder = self.out / f"saved-{precision}"
            worker, found = self.new_adapters(name, precision)
            self.step(worker, LAYOUTS[name], 0)
            self.step(worker, LAYOUTS[name], 1)
            worker.save_checkpoint(folder / "w", folder / "o")
            self.finish(worker, found, name, folder / f"uninterrupted-{self.rank}.pt")

    def resume(self, name: str) -> None:
        """The third step of a run that is resumed with another arrangement of ranks."""
        for precision in ("float32", "bfloat16"):
            folder = self.out / f"saved-{precision}"
            worker, found = self.new_adapters(name, precision)
            self.step(worker, LAYOUTS[name], 7)
            worker.load_checkpoint(folder / "w", folder / "o")
            self.finish(worker, found, name, folder / f"{name}-{self.rank}.pt")

    def new_adapters(self, name: str, precision: str):
        """A worker with new adapters, and their values."""
        layout, generation = with_adapters(LAYOUTS[name], seed=5), {"backend": "hf", "lora": "adapter"}
        worker = self.worker(layout, **TRAINING, precision=precision, generation=generation)
        return worker, {"initial": {key: tensor.clone() for key, tensor in worker.iter_weights()}}

    def finish(self, worker, found, name: str, file: Path) -> None:
        """Take the third step, and write the results."""
        found["result"] = self.step(worker, LAYOUTS[name], 2)
        found["weights"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.shutdown()
        torch.save(found, file)


def work(rank: int, world: int, jobs: str) -> None:
    """All jobs of one rank."""
    me = LoraRank(rank, world, Path(sys.argv[1]), Path(sys.argv[2]))
    for job in jobs.split(","):
        verb, _, name = job.partition(":")
        getattr(me, verb)(name)
        print("done", job, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder in Path(sys.argv[1]).iterdir():
        if (folder / "config.json").is_file():
            AutoConfig.from_pretrained(folder)  # imports what otherwise every rank would import
    for launch in sys.argv[3:]:
        ranks, _, names = launch.partition("=")
        fork_ranks(int(ranks), partial(work, world=int(ranks), jobs=names))
