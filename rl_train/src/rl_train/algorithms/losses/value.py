"""The loss of a critic: the squared error between its values and the returns.

With v the current value, v_old the value before the step, R the return and c the clip range, for each trained state:

    1/2 max((v - R)², (v_old + clip(v - v_old, -c, c) - R)²)

The clip is that of OpenAI's PPO2, described in https://arxiv.org/abs/2005.12729 (section 3); with the factor 1/2 the gradient
is v - R.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction, LossType
from rl_train.algorithms.losses.config import MseValueLossConfig
from rl_train.algorithms.losses.means import token_mean


class MseValueLossFn(LossFunction):
    """Half the squared error, clipped, a mean over all trained states of the global batch; in squared units of reward.

    It is called with values instead of log-probabilities: position t of `values`, `returns` and `prev_values` is the value
    after token t, and `token_mask` is 1 for positions whose value is trained.
    """

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, config: MseValueLossConfig | None = None) -> None:
        self.config = config or MseValueLossConfig()

    @property
    def required_keys(self) -> frozenset[str]:
        """`returns`, and with a clip `prev_values`."""
        return frozenset({"returns"} if self.config.cliprange_value is None else {"returns", "prev_values"})

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics from the values [B, T] float32, the first argument; see `LossFunction`."""
        values, returns = next_token_logprobs, data["returns"]
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        squared = (values - returns).square()
        metrics: dict[str, torch.Tensor] = {}
        if self.config.cliprange_value is not None:
            clip, change = self.config.cliprange_value, values - data["prev_values"]
            clipped_error = (data["prev_values"] + change.clamp(-clip, clip) - returns).square()
            clipped = (change.abs() > clip) & (clipped_error > squared)
            metrics["value/clipped_frac"] = token_mean(clipped.to(values.dtype), mask, global_valid_toks)
            squared = torch.maximum(squared, clipped_error)
        loss = token_mean(0.5 * squared, mask, global_valid_toks)
        return loss, metrics | {
            "loss/value": loss.detach(),
            "value/mean": token_mean(values.detach(), mask, global_valid_toks),
            "value/return_mean": token_mean(returns, mask, global_valid_toks),
        }
