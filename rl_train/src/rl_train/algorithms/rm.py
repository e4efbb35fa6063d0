"""A reward model: of two answers to a prompt, score the chosen one higher.

Follows the reward model of https://arxiv.org/abs/2203.02155 (section 3.5) with these departures:
  1. a pair is a pair: the comparisons of one prompt's answers are independent rows, and each weighs the same, whichever
     prompt it is of;
  2. a pair may ask for a margin (the field `margin` of its record), as in https://arxiv.org/abs/2307.09288;
  3. nothing shifts the scores afterwards; `loss_fn.centring_weight` draws them to mean 0 while they are learnt;
  4. the head begins at zero, so that every answer scores 0 before the first step; a tie counts as half in the accuracy.

What is trained is `policy`, a model with a scalar head; its checkpoints are what the environment `reward_model` scores with.

Letters: B rows, two a pair; T tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.rm_config import RewardModelConfig
from rl_train.algorithms.validation import validate
from rl_train.run import Run


def train(config: RewardModelConfig, run: Run) -> None:
    """Train `run.policy` for `config.max_num_steps` steps in all, from `run.first_step` on."""
    assert run.batches is not None
    validate(run, step=0, score=only_last_tokens)
    for step in run.steps():
        with run.timed("data"):
            batch = run.batches.next_batch()
            only_last_tokens(batch)

        with run.timed("train"):
            run.policy.prepare_for_training()
            run.record_training(run.policy.train(batch, run.loss_fn), batch)
            run.policy.finish_training()

        validate(run, step, score=only_last_tokens)


def only_last_tokens(batch: BatchedDataDict[Any]) -> None:
    """Set `token_mask` to 1 on each row's last token alone, where its score stands: the head reads no other."""
    last = (batch["input_lengths"] - 1).unsqueeze(1)
    batch["token_mask"] = torch.zeros_like(batch["token_mask"]).scatter_(1, last, 1.0)
