"""DPO: raises the likelihood of the chosen answer to a prompt and lowers that of the rejected one.

Follows https://arxiv.org/abs/2305.18290 with these departures:
  1. the loss is a mean over the pairs of a global batch, across ranks and microbatches;
  2. the loss can include the likelihood of the chosen answers (`loss_fn.sft_loss_weight`);
  3. a tie counts as half in the accuracy, so a policy equal to its reference has an accuracy of 0.5.

IPO, the hinge loss, SimPO and ORPO use this module with another loss, see docs/algorithms/dpo.md.

Notation: B rows, two per pair; T tokens.
"""

from __future__ import annotations

from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.testing.outputs.models import scored
from rl_train.algorithms.supervised_configs import DPOConfig
from rl_train.algorithms.validation import validate
from rl_train.run import Run


def train(config: DPOConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    assert run.batches is not None

    def score(batch: BatchedDataDict[Any]) -> None:
        if "reference_policy_logprobs" in run.loss_fn.required_keys:
            scores = scored(run.policy.get_reference_policy_logprobs, batch)
            batch["reference_policy_logprobs"] = scores["reference_logprobs"]

    validate(run, step=0, score=score)
    for step in run.steps():
        with run.timed("data"):
            batch = run.batches.next_batch()

        with run.timed("score"):
            score(batch)

        with run.timed("train"):
            run.policy.prepare_for_training()
            run.record_training(run.policy.train(batch, run.loss_fn), batch)
            run.policy.finish_training()

        validate(run, step, score=score)
