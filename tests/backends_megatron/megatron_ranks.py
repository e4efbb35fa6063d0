"""One of several ranks that train one model together; run as a program, and tests compare what it writes.

Arguments: rank, ranks in all, folder of models by kind, folder for results, names of what to do (comma-separated), and a free
port for each worker to be: a meeting point that was left is not safely met at again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(__file__))
from megatron_cases import (
    FLAT_ADAM,
    NLL,
    SGD,
    K,
    SquaredError,
    WeightedCandidates,
    counts_of,
    make_candidates,
    make_context,
    make_prompts,
    make_rows,
)

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_topk
from rl_backends_megatron.policy import grid
from rl_backends_megatron.worker import MegatronPolicyWorker
from rl_core.errors import NonFiniteError

BUDGET = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 40}
FORMS: dict[str, tuple[dict, dict]] = {
    "by_count": ({}, {}),
    "token_budget": (
        {"dynamic_batching": {"enabled": True}},
        {"dynamic_batching_args": {**BUDGET, "sequence_length_round": 4}},
    ),
    "packed": (
        {"sequence_packing": {"enabled": True}},
        {"sequence_packing_args": {**BUDGET, "algorithm": "modified_first_fit_decreasing"}},
    ),
}
ADAM = {"name": "torch.optim.AdamW", "kwargs": {"lr": 2e-3, "weight_decay": 0.1}}
STEPS = 10
TRAINING = {
    "optimizer": ADAM,
    "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 3, "num_training_steps": 40}},
    "max_grad_norm": 1.0,
    "train_micro_batch_size": 3,
}


@dataclass(frozen=True)
class Layout:
    """One way of dividing one model."""

    kind: str
    world: int
    megatron: dict[str, Any]
    form: str = "by_count"
    fields: dict[str, Any] = field(default_factory=dict)


TP2 = {"tensor_model_parallel_size": 2}
SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 4000}
RECOMPUTE = {"activation_checkpointing": True}
SCALAR = {"head": "scalar"}
LAYOUTS = {
    "tp2": Layout("llama", 2, TP2),
    "tp2-qwen2": Layout("qwen2", 2, {**TP2, "recompute_granularity": "selective"}),
    "tp2-mistral": Layout("mistral", 2, TP2, "packed"),
    "tp2-gemma": Layout("gemma", 2, TP2, "packed"),
    "tp2-sp-gemma": Layout("gemma", 2, SP),
    "tp2-sp": Layout("qwen3", 2, SP),
    "tp2-sp-packed": Layout("qwen3", 2, SP, "packed"),
    "tp2-budget": Layout("llama-tied", 2, TP2, "token_budget", RECOMPUTE),
    "pp2": Layout("llama-tied", 2, PP2),
    "pp2-gemma": Layout("gemma", 2, PP2),
    "pp2-packed": Layout("llama", 2, PP2, "packed"),
    "pp2-uneven": Layout("qwen2", 2, {**PP2, "num_layers_in_first_pipeline_stage": 3}, "token_budget"),
    "interleaved": Layout("llama-tied", 2, INTERLEAVED),
    "interleaved-packed": Layout("qwen3", 2, INTERLEAVED, "packed"),
    "dp2": Layout("qwen3", 2, {}),
    "dp2-packed": Layout("llama", 2, {}, "packed"),
    "dp2-distributed": Layout("qwen3", 2, DISTRIBUTED, "token_budget"),
    "dp2-overlap": Layout("llama", 2, OVERLAP),
    "cp2": Layout("qwen2", 2, CP2),
    "cp2-packed": Layout("llama-tied", 2, CP2, "packed"),
    "ep2": Layout("qwen3-moe", 2, EP2),
    "ep2-mixtral-packed": Layout("mixtral", 2, EP2, "packed"),
    "moe-tp2": Layout("qwen3-moe-raw", 2, SP),
    "one": Layout("llama-tied", 1, {}),
    "one-distributed": Layout("llama-tied", 1, DISTRIBUTED),
    "dp2-tied": Layout("llama-tied", 2, {}),
    "dp2-tied-distributed": Layout("llama-tied", 2, DISTRIBUTED),
    "interleaved-distributed": Layout("llama-tied", 2, {**INTERLEAVED, **DISTRIBUTED}),
    "tp2-dp2-distributed": Layout("llama-tied", 4, {**SP, **OVERLAP}),
    "tp2-pp2-tied": Layout("llama-tied", 4, {**SP, **PP2}),
    "ep2-distributed": Layout("qwen3-moe", 2, {**EP2, **DISTRIBUTED}),
    "moe-dp2": Layout("qwen3-moe", 2, {}),
    "moe-dp2-distributed": Layout("qwen3-moe", 2, DISTRIBUTED),
    "moe-one": Layout("qwen3-moe", 1, {}),
    "tp2-pp2": Layout("llama", 4, {**SP, **PP2}),
    "tp2-pp2-packed": Layout("llama-tied", 4, {**TP2, **PP2}, "packed"),
    "pp2-dp2": Layout("qwen3", 4, {**PP2, **OVERLAP}),
    "tp2-cp2-packed": Layout("qwen3", 4, {**SP, **CP2}, "packed"),
    "tp2-ep2": Layout("qwen3-moe", 4, {**SP, **EP2, **DISTRIBUTED}),
    "value-tp2": Layout("qwen3-value", 2, TP2, "packed", SCALAR),
    "value-tp2-sp": Layout("llama-tied-value", 2, SP, fields=SCALAR),
    "value-pp2": Layout("llama-tied-value", 2, PP2, "token_budget", SCALAR),
    "value-interleaved": Layout("qwen3-value", 2, INTERLEAVED, fields=SCALAR),
    "value-dp2-distributed": Layout("qwen3-value", 2, DISTRIBUTED, fields=SCALAR),
    "value-cp2-packed": Layout("llama-tied-value", 2, CP2, "packed", SCALAR),
    "value-ep2": Layout("qwen3-moe-value", 2, EP2, fields=SCALAR),
}


PARITY = [
    "tp2", "tp2-qwen2", "tp2-mistral", "tp2-gemma", "tp2-sp-gemma", "pp2-gemma", "tp2-sp", "tp2-sp-packed", "tp2-budget",
    "pp2", "pp2-packed", "pp2-uneven", "interleaved", "interleaved-packed", "dp2", "dp2-packed", "dp2-distributed",
    "dp2-overlap", "cp2", "cp2-packed", "ep2", "ep2-mixtral-packed", "moe-tp2", "tp2-pp2", "tp2-pp2-packed", "pp2-dp2",
    "tp2-cp2-packed", "tp2-ep2",
]  # fmt: skip
"""Layouts whose numbers are compared with those of Transformers."""

VALUES = [name for name in LAYOUTS if name.startswith("value-")]
"""Layouts of models with a scalar head."""

CANDIDATES = [
    "tp2", "tp2-budget", "tp2-sp-packed", "pp2", "pp2-packed", "interleaved", "dp2-distributed", "cp2", "cp2-packed", "ep2",
    "tp2-pp2-packed", "tp2-cp2-packed",
]  # fmt: skip
"""Layouts that tell the likeliest tokens, and learn from several at each position."""

RESUMES = [
    ("tp2-pp2-tied", "one"),
    ("tp2-pp2-tied", "dp2-tied"),
    ("tp2-pp2-tied", "pp2"),
    ("tp2-pp2-tied", "tp2-pp2-tied"),
    ("tp2-dp2-distributed", "one-distributed"),
    ("tp2-dp2-distributed", "dp2-tied-distributed"),
    ("tp2-dp2-distributed", "interleaved-distributed"),
    ("tp2-dp2-distributed", "tp2-dp2-distributed"),
    ("tp2-ep2", "ep2-distributed"),
    ("tp2-ep2", "moe-dp2-distributed"),
    ("moe-dp2-distributed", "ep2-distributed"),
    ("ep2", "moe-one"),
    ("moe-dp2", "ep2"),
]
"""Which layout saves, and which resumes."""


def jobs(world: int) -> list[str]:
    """What so many ranks do, in one launch."""
    checks = [f"check:{name}" for name in PARITY if LAYOUTS[name].world == world]
    checks += [f"candidates:{name}" for name in CANDIDATES if LAYOUTS[name].world == world]
    saved = dict.fromkeys(saved for saved, _ in RESUMES)
    saves = [f"save:{name}" for name in saved if LAYOUTS[name].world == world]
    resumes = [f"resume:{saved}:{name}" for saved, name in RESUMES if LAYOUTS[name].world == world]
    vocabulary = ["vocabulary", *(f"values:{name}" for name in VALUES)] if world == 2 else []
    return [*vocabulary, *checks, *saves, *resumes]


class PoisonedOn(NLL):
    """NaN on one rank only: the others must raise as well, not step or wait for ever."""

    def __init__(self, rank: int, poisoned: int) -> None:
        self._rank, self._poisoned = rank, poisoned

    def __call__(self, next_token_logprobs, data, seqs, toks):
        loss, metrics = super().__call__(next_token_logprobs, data, seqs, toks)
        return loss * (float("nan") if self._rank == self._poisoned else 1.0), metrics


def several_case(vocab_size: int):
    """Three targets of each of those positions, two of them the same, and weights of their log-probabilities."""
    generator = torch.Generator().manual_seed(vocab_size + 1)
    targets = torch.randint(0, vocab_size, (9, 3), generator=generator)
    targets[:, 2] = targets[:, 0]
    return targets, torch.randn(9, 3, generator=generator)


def vocabulary_case(vocab_size: int):
    """Logits [9, 130] with large values on padding, targets, and weights of log-probabilities and entropies."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(9, 130, generator=generator)
    logits[:, vocab_size:] = 20.0
    targets = torch.randint(0, vocab_size, (9,), generator=generator)
    return logits, targets, torch.randn(2, 9, generator=generator)


class Rank:
    """This process's share of each check."""

    def __init__(self, rank: int, world: int, models: Path, out: Path, ports: Iterator[int]) -> None:
        self.rank, self.world, self.models, self.out, self.ports = rank, world, models, out, ports

    def worker(self, layout: Layout, **fields: Any) -> MegatronPolicyWorker:
        """A worker that joins the process group anew."""
        config = MegatronPolicyConfig(
            model_name=str(self.models / layout.kind),
            megatron_cfg=MegatronConfig(**layout.megatron, logprob_chunk_tokens=7),
            **{**FORMS[layout.form][0], **layout.fields, **fields},
        )
        worker = MegatronPolicyWorker(make_context(self.rank, self.world, next(self.ports)), config)
        self.facts = worker.setup()
        return worker

    def shard(self, layout: Layout, rows):
        """This rank's rows, in the form that the layout asks for; and the order in which all rows were dealt."""
        named = grid(MegatronConfig(**layout.megatron), self.world)
        plan = FORMS[layout.form][1]
        sharded = rows.shard_by_batch_size(named.get_axis_size("data"), **plan)
        shards, order = sharded if plan else (sharded, None)
        return shards[named.get_worker_coords(self.rank)["data"]], order

    def check(self, name: str) -> None:
        """Scores, one gradient, and ten steps of one layout."""
        layout = LAYOUTS[name]
        found: dict[str, Any] = {}
        one = FLAT_ADAM if layout.megatron.get("use_distributed_optimizer") else SGD
        worker = self.worker(layout, optimizer=one, max_grad_norm=None, train_micro_batch_size=3, logprob_batch_size=3)
        rows = make_rows()
        shard, found["order"] = self.shard(layout, rows)
        found["facts"] = self.facts
        found["logprobs"] = worker.get_logprobs(shard)["logprobs"]
        found["reference"] = worker.get_logprobs(shard, reference=True)["logprobs"]
        if "context_parallel_size" not in layout.megatron:
            found["sampled"] = worker.generate(make_prompts(), greedy=True)
        found["before"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        found["eval"] = worker.train(shard, NLL(), counts=counts_of(rows), eval_mode=True)[0]
        found["step"] = worker.train(shard, NLL(), counts=counts_of(rows))[0]
        found["after"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        some = list(worker.weight_manifest())[1::3]
        found["some"] = {key: tensor.clone() for key, tensor in worker.iter_weights(some)}
        found["manifest"] = worker.weight_manifest()
        worker.shutdown()
        worker = self.worker(layout, **TRAINING)
        found["steps"] = [self.step(worker, layout, number) for number in range(STEPS)]
        found["trained"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        found["fingerprint"] = worker.weight_fingerprint()
        worker.shutdown()
        torch.save(found, self.out / f"{name}-{self.rank}.pt")

    def candidates(self, name: str) -> None:
        """The likeliest tokens, and one gradient through candidates, at a temperature."""
        layout = LAYOUTS[name]
        one = FLAT_ADAM if layout.megatron.get("use_distributed_optimizer") else SGD
        sampling = {"backend": "megatron", "temperature": 0.8}
        sizes = {"train_micro_batch_size": 3, "logprob_batch_size": 3}
        worker = self.worker(layout, optimizer=one, max_grad_norm=None, generation=sampling, **sizes)
        rows = make_candidates()
        found: dict[str, Any] = {}
        shard, found["order"] = self.shard(layout, rows)
        found.update(worker.get_topk_logprobs(shard, k=K))
        found["before"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        found["eval"] = worker.train(shard, WeightedCandidates(), counts=counts_of(rows), eval_mode=True)[0]
        found["step"] = worker.train(shard, WeightedCandidates(), counts=counts_of(rows))[0]
        found["after"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.shutdown()
        torch.save(found, self.out / f"candidates-{name}-{self.rank}.pt")

    def values(self, name: str) -> None:
        """Values, one gradient, and a checkpoint of a model with a scalar head; and a step of a fresh head."""
        layout = LAYOUTS[name]
        one = FLAT_ADAM if layout.megatron.get("use_distributed_optimizer") else SGD
        worker = self.worker(layout, optimizer=one, max_grad_norm=None, train_micro_batch_size=3, logprob_batch_size=3)
        rows = make_rows()
        found: dict[str, Any] = {"manifest": worker.weight_manifest()}
        shard, found["order"] = self.shard(layout, rows)
        found["values"] = worker.get_values(shard)["values"]
        found["before"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.save_checkpoint(self.out / name / "w", self.out / name / "o")
        found["step"] = worker.train(shard, SquaredError(), counts=counts_of(rows))[0]
        found["after"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        worker.load_checkpoint(self.out / name / "w", self.out / name / "o")
        found["again"] = worker.get_values(shard)["values"]
        worker.shutdown()
        fresh = Layout(layout.kind.removesuffix("-value"), layout.world, layout.megatron, layout.form, layout.fields)
        worker = self.worker(fresh, **TRAINING)
        found["zeros"] = worker.get_values(shard)["values"]
        found["fresh"] = [worker.train(shard, SquaredError(), counts=counts_of(rows))[0] for _ in range(STEPS)]
        found["learnt"] = worker.get_values(shard)["values"]
        worker.shutdown()
        torch.save(found, self.out / f"{name}-{self.rank}.pt")

    def vocabulary(self) -> None:
        """Log-probabilities, entropies and their gradients from halves of the logits."""
        worker = self.worker(LAYOUTS["tp2"])
        group = worker._ranks.tensor
        found = {}
        # Of 130 entries 125 count, and of 130 only 60: then the second half is padding alone.
        for vocab_size in (125, 60):
            logits, targets, weights = vocabulary_case(vocab_size)
            part = logits[:, self.rank * 65 : (self.rank + 1) * 65].clone().requires_grad_()
            logprobs, entropy = vocab_parallel_logprobs(
                part, targets, group=group, vocab_size=vocab_size, temperature=0.7, chunk=4, entropy=True
            )
            ((logprobs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
            assert torch.equal(part.detach(), logits[:, self.rank * 65 : (self.rank + 1) * 65])
            found[vocab_size] = logprobs.detach(), entropy.detach(), part.grad
            found[vocab_size, "several"] = self.several(part.detach(), group, vocab_size)
        worker.shutdown()
        torch.save(found, self.out / f"vocabulary-{self.rank}.pt")

    def several(self, part: torch.Tensor, group: Any, vocab_size: int):
        """Log-probabilities of several targets and their gradient; the six likeliest of all, and all."""
        part = part.requires_grad_()
        shape = {"group": group, "vocab_size": vocab_size, "temperature": 0.7, "chunk": 4}
        targets, weights = several_case(vocab_size)
        logprobs, _ = vocab_parallel_logprobs(part, targets, **shape)
        (logprobs * weights).sum().backward()
        nothing, _ = vocab_parallel_topk(part[:0], k=3, **shape)
        assert nothing.shape == (0, 3)
        likeliest = [vocab_parallel_topk(part, k=k, **shape) for k in (6, vocab_size)]
        return logprobs.detach(), part.grad, likeliest

    def save(self, name: str) -> None:
        """Two steps, a checkpoint, and the third step of a run that is not interrupted."""
        layout = LAYOUTS[name]
        for precision in ("float32", "bfloat16"):
            folder = self.out / f"saved-{name}-{precision}"
            worker = self.worker(layout, **TRAINING, precision=precision)
            worker.save_checkpoint(folder / "w0", folder / "o0")
            self.step(worker, layout, 0)
            self.step(worker, layout, 1)
            worker.save_checkpoint(folder / "w", folder / "o")
            result = self.step(worker, layout, 2)
            poisoned = self.poison(worker, layout)
            found = {"result": result, "poisoned": poisoned, "version": worker.get_weight_version()}
            found["weights"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            worker.shutdown()
            torch.save(found, folder / f"{self.rank}.pt")

    def resume(self, saved: str, name: str) -> None:
        """Go on from a checkpoint of another layout: the third step, and back to the start."""
        layout = LAYOUTS[name]
        for precision in ("float32", "bfloat16"):
            folder = self.out / f"saved-{saved}-{precision}"
            worker = self.worker(layout, **TRAINING, precision=precision)
            self.step(worker, layout, 5)
            worker.load_checkpoint(folder / "w", folder / "o")
            found = {"version": worker.get_weight_version(), "result": self.step(worker, layout, 2)}
            found["weights"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            found["reference"] = worker.get_logprobs(make_rows(), reference=True)["logprobs"]
            worker.load_checkpoint(folder / "w0", folder / "o0")
            for number in range(3):
                self.step(worker, layout, number)
            found["from_start"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            worker.shutdown()
            torch.save(found, folder / f"{name}-{self.rank}.pt")

    def poison(self, worker: MegatronPolicyWorker, layout: Layout) -> str:
        """What comes of a loss that is not a number on one rank."""
        rows = make_rows(seed=3)
        last = self.world - 1 if layout.megatron.get("pipeline_model_parallel_size", 1) > 1 else 1
        try:
            worker.train(self.shard(layout, rows)[0], PoisonedOn(self.rank, last), counts=counts_of(rows))
        except NonFiniteError as error:
            return str(error)
        return ""

    def step(self, worker: MegatronPolicyWorker, layout: Layout, number: int):
        """One step on rows of their own."""
        rows = make_rows(seed=100 + number)
        return worker.train(self.shard(layout, rows)[0], NLL(), counts=counts_of(rows))[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[5].split(",")
    me = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), map(int, sys.argv[6:]))
    for each in names:
        verb, *arguments = each.split(":")
        getattr(me, verb)(*arguments)
        print("done", each, flush=True)
