"""Reward model training: the chosen answer to a prompt gets a higher score than the rejected one.

Follows the reward model of https://arxiv.org/abs/2203.02155 (section 3.5) with these departures:
  1. all pairs of answers to a prompt are independent rows, and all pairs have the same weight;
  2. a pair may have a margin (the field `margin` of its record), as in https://arxiv.org/abs/2307.09288;
  3. scores are not shifted afterwards; `loss_fn.centring_weight` keeps their mean near 0 during training;
  4. the head is initialized to zero, so all scores are 0 before the first step; a tie counts as half in the accuracy.

The trained model is `policy`, with a scalar head; the environment `reward_model` loads its checkpoints.

Notation: B rows, two per pair; T tokens.
"""

from __future__ import annotations

import torch

from rl_train.algorithms.supervised_configs import RewardModelConfig
from rl_train.run import Run
from rl_train.step import Batch, next_rows, optimize, validate


def train(config: RewardModelConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    validate(run, step=0, score=mask_to_last_tokens)
    for step in run.steps():
        batch = next_rows(run)
        mask_to_last_tokens(run, batch)
        optimize(run, batch)
        validate(run, step, score=mask_to_last_tokens)


def mask_to_last_tokens(run: Run, batch: Batch) -> None:
    """Set `token_mask` to 1 only at the last token of each row, where the head computes its score."""
    last = (batch["input_lengths"] - 1).unsqueeze(1)
    batch["token_mask"] = torch.zeros_like(batch["token_mask"]).scatter_(1, last, 1.0)
