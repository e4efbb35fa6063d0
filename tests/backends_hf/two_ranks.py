"""Two ranks that train together, run as a program by test_policy_ranks.py, which compares the output.

Arguments: folder of models by kind, folder for results, and a free port for each worker to be: ports are not reused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.dirname(os.path.dirname(__file__)))
from conftest import NLL, SGD, counts_of, make_config, make_context, make_prompt_rows, make_rows
from policy_cases import WITH_MUON
from rank_processes import fork_ranks

from rl_backends_base.shards import local, whole
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import NonFiniteError, NotSupportedError

BUDGET = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 40}
FORMS = {
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


class PoisonedOnRankOne(NLL):
    """NaN on one rank only: the other must raise too, and neither step nor wait forever."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, next_token_logprobs, data, seqs, toks):
        loss, metrics = super().__call__(next_token_logprobs, data, seqs, toks)
        return loss * (float("nan") if self._rank == 1 else 1.0), metrics


class Rank:
    """The work of this process in each check."""

    def __init__(self, rank: int, ports: Iterator[int], models: Path, out: Path, mode: str) -> None:
        self.rank, self.ports, self.models, self.out, self.mode = rank, ports, models, out, mode

    def worker(self, kind: str, **fields) -> HFPolicyWorker:
        """A worker that joins the process group again."""
        config = make_config(str(self.models / kind), hf={"data_parallel": self.mode}, **fields)
        worker = HFPolicyWorker(make_context(self.rank, 2, next(self.ports)), config)
        worker.setup()
        return worker

    def gradients(self) -> None:
        """One step under SGD for each model and each form of microbatch."""
        found = {}
        for kind in ("llama-tied", "qwen2", "qwen3"):
            for form, (section, plan) in FORMS.items():
                rows = make_rows()
                worker = self.worker(kind, **section, optimizer=SGD, max_grad_norm=None, train_micro_batch_size=3)
                before = {name: tensor.clone() for name, tensor in worker.iter_weights()}
                sharded = rows.shard_by_batch_size(2, **plan)
                shard = (sharded[0] if plan else sharded)[self.rank]
                result = worker.train(shard, NLL(), counts=counts_of(rows))[0]
                after = {name: tensor.clone() for name, tensor in worker.iter_weights()}
                found[kind, form] = {"before": before, "after": after, "norm": result.grad_norm, "loss": result.loss}
                worker.shutdown()
        torch.save(found, self.out / f"{self.mode}-gradients-{self.rank}.pt")

    def shared_prefix(self) -> None:
        """One step under SGD on rows that share their prompts' prefixes, by count and packed."""
        found = {}
        for form in ("by_count", "packed"):
            section, plan = FORMS[form]
            rows = make_prompt_rows()
            worker = self.worker("llama-tied", **section, optimizer=SGD, max_grad_norm=None, train_micro_batch_size=2)
            before = {name: tensor.clone() for name, tensor in worker.iter_weights()}
            shards, _ = rows.shard_by_batch_size(2, keep_together="prompt_id", **plan)
            worker.train(shards[self.rank], NLL(), counts=counts_of(rows))
            after = {name: tensor.clone() for name, tensor in worker.iter_weights()}
            found[form] = {"before": before, "after": after, "shared": worker._unshared is None}
            worker.shutdown()
        torch.save(found, self.out / f"{self.mode}-shared-{self.rank}.pt")

    def checkpoint(self) -> None:
        """Resume one rank's checkpoint, take a step, save, corrupt the state, and resume the saved checkpoint."""
        for precision in ("float32", "bfloat16"):
            folder = self.out / precision
            rows = make_rows(seed=9)
            worker = self.worker("llama-tied", precision=precision, optimizer={"kwargs": {"lr": 1e-2}})
            shard = rows.shard_by_batch_size(2)[self.rank]
            worker.load_checkpoint(folder / "one" / "w", folder / "one" / "o")
            first = worker.train(shard, NLL(), counts=counts_of(rows))[0]
            two = folder / f"two-{self.mode}"
            worker.save_checkpoint(two / "w", two / "o")
            reference = worker.get_logprobs(shard, reference=True)["logprobs"]
            try:
                worker.train(shard, PoisonedOnRankOne(self.rank), counts=counts_of(rows))
                raised = ""
            except NonFiniteError as error:
                raised = str(error)
            second = worker.train(shard, NLL(), counts=counts_of(rows))[0]
            worker.load_checkpoint(two / "w", two / "o")
            again = worker.train(shard, NLL(), counts=counts_of(rows))[0]
            worker.save_checkpoint(two / "after", None)
            torch.save(
                {
                    "losses": (first.loss, second.loss, again.loss),
                    "norms": (first.grad_norm, second.grad_norm, again.grad_norm),
                    "reference": reference,
                    "logprobs": worker.get_logprobs(shard)["logprobs"],
                    "topk_logprobs": worker.get_topk_logprobs(shard, k=3)["topk_logprobs"],
                    "raised": raised,
                    "version": worker.get_weight_version(),
                    "generates": self.generates(worker, shard),
                    "fingerprint": worker.weight_fingerprint(),
                    "held": sum(
                        p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in worker.model.parameters()
                    ),
                },
                self.out / f"{self.mode}-{precision}-{self.rank}.pt",
            )
            worker.shutdown()

    def muon(self) -> None:
        """Two steps with Muon for matrices, whole weights before and after each, and the whole gradients of the steps."""
        worker = self.worker("qwen3", optimizer=WITH_MUON, max_grad_norm=0.5, train_micro_batch_size=3)
        masters, rows = worker.state.masters, make_rows()
        steps: list[dict[str, dict[str, torch.Tensor]]] = []

        def record(*_: object) -> None:
            gradients = {name: whole(each).clone() for name, each in masters.gradients().items()}
            steps.append({"before": weights(), "gradients": gradients})

        def weights() -> dict[str, torch.Tensor]:
            return {name: whole(each.detach()).clone() for name, each in masters.parameters.items()}

        worker.state.optimizer.register_step_pre_hook(record)
        for _ in range(2):
            worker.train(rows.shard_by_batch_size(2)[self.rank], NLL(), counts=counts_of(rows))
        worker.save_checkpoint(self.out / f"muon-{self.mode}" / "w", self.out / f"muon-{self.mode}" / "o")
        momentum = {
            name: worker.state.optimizer.state[each]["momentum_buffer"]
            for name, each in masters.parameters.items()
            if "momentum_buffer" in worker.state.optimizer.state[each]
        }
        found = {
            "steps": steps,
            "after": weights(),
            "momentum": {name: whole(each).clone() for name, each in momentum.items()},
            "held": sum(local(each).numel() for each in momentum.values()),
        }
        torch.save(found, self.out / f"{self.mode}-muon-{self.rank}.pt")
        worker.shutdown()

    def generates(self, worker: HFPolicyWorker, shard) -> str:
        """The result of sampling from the policy itself."""
        try:
            worker.generate(shard.slice(0, 1))
        except NotSupportedError as error:
            return str(error)
        return "yes"


def work(rank: int) -> None:
    """All checks of one rank."""
    ports = map(int, sys.argv[3:])
    for mode in ("replicate", "fsdp2"):
        me = Rank(rank, ports, Path(sys.argv[1]), Path(sys.argv[2]), mode)
        me.gradients()
        me.shared_prefix()
        me.checkpoint()
        me.muon()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(2, work)
