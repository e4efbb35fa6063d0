"""The Bradley-Terry loss of a reward model.

Row 2i of a batch is a chosen answer and row 2i + 1 the rejected answer to the same prompt. With r_c and r_r their scores, the
values after their last tokens, and m the margin of the pair's record (0 by default):

    -log s(r_c - r_r - m) + w (r_c + r_r)^2

Bradley and Terry 1952, with the probability s(r_c - r_r) that the chosen answer is preferred. The margin is that of Llama 2,
https://arxiv.org/abs/2307.09288, equation 2. The second term fixes the mean of all scores, which pairs leave undetermined:
https://arxiv.org/abs/2312.09244, equation 2. s is the logistic function. Notation: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction, LossType
from rl_train.algorithms.losses.preference import TIE
from rl_train.algorithms.losses.reward_config import BradleyTerryLossConfig


class BradleyTerryLossFn(LossFunction):
    """The negative log-likelihood of the preferences, averaged over the pairs of the global batch.

    It is called with values instead of log-probabilities, and uses the value after each row's last token; only this token
    must be in `token_mask`.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_unit = 2
    required_keys = frozenset({"margins"})

    def __init__(self, config: BradleyTerryLossConfig | None = None) -> None:
        self.config = config or BradleyTerryLossConfig()

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics from the values [B, T] float32, the first argument; see `LossFunction`.

        Both rows of a pair have the same `sample_mask`.
        """
        counts = data["sample_mask"][0::2] * data["sample_mask"][1::2]
        num_pairs = (global_valid_seqs / 2).clamp(min=1.0)

        def mean(of_pairs: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = (of_pairs * counts).sum() / num_pairs
            return total

        scores = last_values(next_token_logprobs, data["input_lengths"])
        chosen, rejected = scores[0::2], scores[1::2]
        leads = chosen - rejected
        preference = mean(-logsigmoid(leads - data["margins"][0::2]))
        centring = mean((chosen + rejected).square())
        loss = preference + self.config.centring_weight * centring
        leads = leads.detach()
        return loss, {
            "loss/preference": preference.detach(),
            "loss/centring": centring.detach(),
            "preference/accuracy": mean((leads > TIE).float() + 0.5 * (leads.abs() <= TIE).float()),
            "preference/margin": mean(leads),
            "preference/score_chosen": mean(chosen.detach()),
            "preference/score_rejected": mean(rejected.detach()),
        }


def last_values(values: torch.Tensor, input_lengths: torch.Tensor) -> torch.Tensor:
    """[B] the value after each row's last token.

    Args:
        values: [B, T] float32.
        input_lengths: [B] int64, tokens of each row.
    """
    return values.gather(1, (input_lengths - 1).unsqueeze(1)).squeeze(1)
