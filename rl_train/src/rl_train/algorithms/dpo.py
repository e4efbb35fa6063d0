"""DPO: raises the likelihood of the chosen answer to a prompt and lowers that of the rejected one.

Follows https://arxiv.org/abs/2305.18290 with these departures:
  1. the loss is a mean over the pairs of a global batch, across ranks and microbatches;
  2. the loss can include the likelihood of the chosen answers (`loss_fn.sft_loss_weight`);
  3. a tie counts as half in the accuracy, so a policy equal to its reference has an accuracy of 0.5.

IPO, the hinge loss, SimPO and ORPO use this module with another loss, see docs/algorithms/dpo.md.

Notation: B rows, two per pair; T tokens.
"""

from __future__ import annotations

from rl_train.algorithms.supervised_configs import DPOConfig
from rl_train.run import Run
from rl_train.step import add_logprobs, next_rows, optimize, score, validate


def train(config: DPOConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    validate(run, step=0, score=add_logprobs)
    for step in run.steps():
        batch = next_rows(run)
        score(run, batch)
        optimize(run, batch)
        validate(run, step, score=add_logprobs)
