"""Ranks that train a model together, run as a program; tests compare the output.

Arguments: folder of models by kind, folder for results, and for each launch `RANKS=JOB,JOB...`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from megatron.core.parallel_state import get_data_parallel_group, get_expert_data_parallel_group
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
from megatron_layouts import FORMS, LAYOUTS, SCALAR, SMALL_STEPS, STEPS, TRAINING, Layout, grid_of
from policy_cases import LargestTensor
from rank_processes import fork_ranks
from transformers import AutoConfig

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.scoring import vocab_parallel_logprobs, vocab_parallel_topk
from rl_backends_megatron.worker import MegatronPolicyWorker
from rl_core.errors import NonFiniteError
from rl_core.rendezvous.interfaces import free_port


class PoisonedOn(NLL):
    """NaN on one rank only: the others must raise too, and neither step nor wait forever."""

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
    """Logits [9, 130] with large values on padding, targets, and weights of log-probabilities."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(9, 130, generator=generator)
    logits[:, vocab_size:] = 20.0
    targets = torch.randint(0, vocab_size, (9,), generator=generator)
    return logits, targets, torch.randn(9, generator=generator)


def shares_of_masters(worker: MegatronPolicyWorker) -> dict[tuple[int, str], torch.Tensor | None]:
    """By chunk and Megatron's name: the part of each weight that this rank updates, flat and float32; None if empty."""
    found = {}
    for number, chunk in enumerate(worker._model.chunks.modules):
        for name, parameter in chunk.named_parameters():
            master = parameter.main_param
            found[number, name] = None if master is None else master.detach().flatten().clone()
    return found


def whole_masters(worker: MegatronPolicyWorker) -> dict[str, torch.Tensor]:
    """By the checkpoint's name, from all ranks."""

    def gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
        if not getattr(parameter, "main_param_sharded", False):
            return parameter.main_param.detach()
        group = get_data_parallel_group() if getattr(parameter, "allreduce", True) else get_expert_data_parallel_group()
        shares: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(shares, parameter.main_param, group=group)
        return torch.cat([share.detach() for share in shares if share is not None]).view(parameter.shape)

    whole = worker._model.bridge.export(value=gathered, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in whole}


class Rank:
    """The work of this process in each check."""

    def __init__(self, rank: int, world: int, models: Path, out: Path) -> None:
        self.rank, self.world, self.models, self.out = rank, world, models, out
        self.meetings = 0

    def worker(self, layout: Layout, **fields: Any) -> MegatronPolicyWorker:
        """A worker that joins the process group again."""
        config = MegatronPolicyConfig(
            model_name=str(self.models / layout.kind),
            megatron_cfg=MegatronConfig(**layout.megatron, logprob_chunk_tokens=7),
            **{**FORMS[layout.form][0], **layout.fields, **fields},
        )
        worker = MegatronPolicyWorker(make_context(self.rank, self.world, self.meeting_port()), config)
        self.facts = worker.setup()
        return worker

    def meeting_port(self) -> int:
        """A free port for the next worker, chosen by rank 0 and shared through a file; ports are not reused."""
        self.meetings += 1
        port_file = self.out / f"port-{self.world}-{self.meetings}"
        if self.rank == 0:
            port_file.with_suffix(".new").write_text(str(free_port("127.0.0.1")))
            port_file.with_suffix(".new").rename(port_file)
        while not port_file.exists():
            time.sleep(0.002)
        return int(port_file.read_text())

    def shard(self, layout: Layout, rows):
        """The rows of this rank in the form required by the layout, and the order of all rows."""
        named = grid_of(layout)
        plan = FORMS[layout.form][1]
        sharded = rows.shard_by_batch_size(named.get_axis_size("data"), **plan)
        shards, order = sharded if plan else (sharded, None)
        return shards[named.get_worker_coords(self.rank)["data"]], order

    def check(self, name: str) -> None:
        """Scores, one gradient, and some steps of one layout."""
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
            data_rank = grid_of(layout).get_worker_coords(self.rank)["data"]  # one rank's rows end before those of another
            found["sampled"] = worker.generate(make_prompts().slice(min(data_rank, 1), 3), greedy=True)
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
        """Top-k tokens and one gradient through candidates, at a temperature."""
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
        found["trained_values"] = worker.get_values(shard)["values"]
        worker.shutdown()
        torch.save(found, self.out / f"{name}-{self.rank}.pt")

    def masters(self, name: str) -> None:
        """Float32 master weights: initial values, the effect of small steps, and values after loading a folder."""
        layout = LAYOUTS[name]
        worker = self.worker(layout, optimizer=SMALL_STEPS, max_grad_norm=None, train_micro_batch_size=3, precision="bfloat16")
        found: dict[str, Any] = {"begin": shares_of_masters(worker), "whole": whole_masters(worker)}
        found["published"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
        if layout.fields != SCALAR:
            found["steps"] = [self.step(worker, layout, number) for number in range(3)]
            found["stepped"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            found["moved"] = whole_masters(worker)
        worker.load_checkpoint(self.models / layout.kind, None)
        found["again"] = shares_of_masters(worker)
        worker.shutdown()
        torch.save(found, self.out / f"masters-{name}-{self.rank}.pt")

    def vocabulary(self) -> None:
        """Log-probabilities and their gradients from tensor-parallel logits."""
        worker = self.worker(LAYOUTS["tp2"])
        group = worker._ranks.tensor
        found = {}
        # 125 of 130 entries count, or only 60 of 130: then the second half is only padding.
        for vocab_size in (125, 60):
            logits, targets, weights = vocabulary_case(vocab_size)
            part = logits[:, self.rank * 65 : (self.rank + 1) * 65].clone().requires_grad_()
            logprobs = vocab_parallel_logprobs(part, targets, group=group, vocab_size=vocab_size, temperature=0.7, chunk=4)
            (logprobs * weights).sum().backward()
            assert torch.equal(part.detach(), logits[:, self.rank * 65 : (self.rank + 1) * 65])
            found[vocab_size] = logprobs.detach(), part.grad
            found[vocab_size, "several"] = self.several(part.detach(), group, vocab_size)
        worker.shutdown()
        torch.save(found, self.out / f"vocabulary-{self.rank}.pt")

    def several(self, part: torch.Tensor, group: Any, vocab_size: int):
        """Log-probabilities of several targets and their gradient; the top six of all, and all."""
        part = part.requires_grad_()
        shape = {"group": group, "vocab_size": vocab_size, "temperature": 0.7, "chunk": 4}
        targets, weights = several_case(vocab_size)
        logprobs = vocab_parallel_logprobs(part, targets, **shape)
        (logprobs * weights).sum().backward()
        nothing, _ = vocab_parallel_topk(part[:0], k=3, **shape)
        assert nothing.shape == (0, 3)
        topk = [vocab_parallel_topk(part, k=k, **shape) for k in (6, vocab_size)]
        return logprobs.detach(), part.grad, topk

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
            found: dict[str, Any] = {"masters": whole_masters(worker) if precision == "bfloat16" else {}}
            found["result"] = self.step(worker, layout, 2)
            if precision == "float32":
                found["saving"] = self.share_of_largest_tensor(worker, folder / "again")
                found["poisoned"] = self.step_with_nan(worker, layout)
            found["version"] = worker.get_weight_version()
            found["weights"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            worker.shutdown()
            torch.save(found, folder / f"{self.rank}.pt")

    def resume(self, saved: str, name: str) -> None:
        """Resume a checkpoint of another layout: the third step, and back to the start."""
        layout = LAYOUTS[name]
        for precision in ("float32", "bfloat16"):
            folder = self.out / f"saved-{saved}-{precision}"
            worker = self.worker(layout, **TRAINING, precision=precision)
            self.step(worker, layout, 5)
            worker.load_checkpoint(folder / "w", folder / "o")
            found: dict[str, Any] = {"masters": whole_masters(worker) if precision == "bfloat16" else {}}
            found["version"] = worker.get_weight_version()
            found["result"] = self.step(worker, layout, 2)
            found["weights"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            if precision == "float32":
                found["reference"] = worker.get_logprobs(make_rows(), reference=True)["logprobs"]
                worker.load_checkpoint(folder / "w0", folder / "o0")
                for number in range(3):
                    self.step(worker, layout, number)
                found["from_start"] = {key: tensor.clone() for key, tensor in worker.iter_weights()}
            worker.shutdown()
            torch.save(found, folder / f"{name}-{self.rank}.pt")

    def share_of_largest_tensor(self, worker: MegatronPolicyWorker, folder: Path) -> float:
        """Size of the largest float32 tensor that saving the training state creates, relative to the weights of this rank."""
        with LargestTensor(dtype=torch.float32) as largest:
            worker.save_training_state(folder)
        chunks = worker._model.chunks.modules
        return largest.elements / sum(each.numel() for chunk in chunks for each in chunk.parameters())

    def step_with_nan(self, worker: MegatronPolicyWorker, layout: Layout) -> str:
        """The result of a NaN loss on one rank."""
        rows = make_rows(seed=3)
        last = self.world - 1 if layout.megatron.get("pipeline_model_parallel_size", 1) > 1 else 1
        try:
            worker.train(self.shard(layout, rows)[0], PoisonedOn(self.rank, last), counts=counts_of(rows))
        except NonFiniteError as error:
            return str(error)
        return ""

    def step(self, worker: MegatronPolicyWorker, layout: Layout, number: int):
        """One step on separate rows."""
        rows = make_rows(seed=100 + number)
        return worker.train(self.shard(layout, rows)[0], NLL(), counts=counts_of(rows))[0]


def work(rank: int, world: int, jobs: str) -> None:
    """All jobs of one rank."""
    me = Rank(rank, world, Path(sys.argv[1]), Path(sys.argv[2]))
    for job in jobs.split(","):
        verb, *arguments = job.split(":")
        getattr(me, verb)(*arguments)
        print("done", job, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder in Path(sys.argv[1]).iterdir():
        AutoConfig.from_pretrained(folder)  # imports what otherwise every rank would import
    for launch in sys.argv[3:]:
        ranks, _, names = launch.partition("=")
        fork_ranks(int(ranks), partial(work, world=int(ranks), jobs=names))
