"""Supervised training: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction, LossType
from rl_train.algorithms.losses.config import NLLLossConfig
from rl_train.algorithms.losses.reduce import token_mean


class NLLLossFn(LossFunction):
    """-log p(token), a mean over all trained tokens of the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    allows_dropout = True

    def __init__(self, config: NLLLossConfig | None = None) -> None:
        self.config = config or NLLLossConfig()

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss in nats per token, and its metrics; see `LossFunction`."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = token_mean(-next_token_logprobs, mask, global_valid_toks)
        return loss, {"loss/nll": loss.detach()}
