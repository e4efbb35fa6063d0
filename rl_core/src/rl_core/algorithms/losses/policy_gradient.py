"""The clipped policy gradient and its KL penalty.

Clipping: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476,
equation 10; dual clip: https://arxiv.org/abs/1912.09729, equation 5; KL penalty in the loss: GRPO,
https://arxiv.org/abs/2402.03300, equation 3; truncated importance sampling: https://fengyao.notion.site/off-policy-rl.

Letters: B rows, T tokens. Everything is in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rl_core.algorithms.kl import calculate_kl
from rl_core.algorithms.losses.config import ClippedPGLossConfig
from rl_core.algorithms.losses.reduce import sequence_mean, token_mean
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction, LossType, Reduction


class ClippedPGLossFn(LossFunction):
    """-min(ratio · A, clip(ratio) · A) at each trained token, plus the weighted KL to the reference policy.

    ratio = exp(log p now - log p before the step). With `on_policy` the two are the same number, so the batch need not hold
    `prev_logprobs` and the ratio is 1 with the gradient of log p.
    """

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {"ratio/min": "min", "ratio/max": "max"}

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        self.config = config or ClippedPGLossConfig()
        self.loss_type = LossType.TOKEN_LEVEL if self.config.token_level_loss else LossType.SEQUENCE_LEVEL

    @property
    def required_keys(self) -> frozenset[str]:
        """`advantages`, `generation_logprobs`, and what the ratio and the penalty compare with."""
        keys = {"advantages", "generation_logprobs"}
        if not self.on_policy:
            keys.add("prev_logprobs")
        if self.config.reference_policy_kl_penalty > 0:
            keys.add("reference_policy_logprobs")
        return frozenset(keys)

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `LossFunction`; `advantages` [B, T] float32, the log-probabilities [B, T] float32."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        previous = next_token_logprobs.detach() if self.on_policy else data["prev_logprobs"]
        ratio = torch.exp((next_token_logprobs - previous) * (mask > 0))

        per_token = self._surrogate(next_token_logprobs, ratio, data["advantages"])
        if self.config.use_importance_sampling_correction:
            per_token = per_token * self._sampling_weight(previous, data["generation_logprobs"], mask)
        policy_loss = self._mean(per_token, mask, global_valid_seqs, global_valid_toks)
        loss = policy_loss
        metrics = {"loss/policy": policy_loss.detach()}
        if self.config.reference_policy_kl_penalty > 0:
            kl = self._reference_kl(next_token_logprobs, data["reference_policy_logprobs"])
            penalty = self._mean(kl, mask, global_valid_seqs, global_valid_toks)
            loss = loss + self.config.reference_policy_kl_penalty * penalty
            metrics["kl/reference"] = penalty.detach()
        metrics |= self._metrics(next_token_logprobs.detach(), ratio.detach(), previous, data, mask, global_valid_toks)
        return loss, metrics

    def _surrogate(self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.disable_ppo_ratio:
            return -advantages * logprobs
        clipped = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if config.ratio_clip_c is not None:
            bound = torch.minimum(loss, -advantages * config.ratio_clip_c)
            loss = torch.where(advantages < 0, bound, loss)
        return loss

    def _sampling_weight(self, previous: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        log_weight = (previous - sampled) * (mask > 0)
        return log_weight.exp().clamp(max=self.config.importance_sampling_max)

    def _reference_kl(self, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return calculate_kl(
            logprobs,
            reference,
            self.config.reference_policy_kl_type,
            input_clamp_value=self.config.kl_input_clamp_value,
            output_clamp_value=self.config.kl_output_clamp_value,
        )

    def _mean(self, values: torch.Tensor, mask: torch.Tensor, seqs: torch.Tensor, toks: torch.Tensor) -> torch.Tensor:
        if self.loss_type is LossType.TOKEN_LEVEL:
            return token_mean(values, mask, toks)
        return sequence_mean(values, mask, seqs)

    def _metrics(
        self,
        logprobs: torch.Tensor,
        ratio: torch.Tensor,
        previous: torch.Tensor,
        data: BatchedDataDict[Any],
        mask: torch.Tensor,
        toks: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        trained = mask > 0
        advantages, sampled = data["advantages"], data["generation_logprobs"]
        above = (ratio > 1.0 + self.config.ratio_clip_max) & (advantages > 0)
        below = (ratio < 1.0 - self.config.ratio_clip_min) & (advantages < 0)
        one = torch.ones_like(ratio)
        return {
            "ratio/mean": token_mean(ratio, mask, toks),
            "ratio/min": torch.where(trained, ratio, one).min(),
            "ratio/max": torch.where(trained, ratio, one).max(),
            "ratio/clipped_frac": token_mean((above | below).float(), mask, toks),
            "entropy/sampled": token_mean(-logprobs, mask, toks),
            "mismatch/kl": token_mean(calculate_kl(sampled, previous, "k3"), mask, toks),
            "mismatch/mult_prob_error": token_mean((previous - sampled).abs().exp(), mask, toks),
        }


class GRPOLossFn(ClippedPGLossFn):
    """`ClippedPGLossFn` with the defaults of the GRPO paper: a KL penalty of 0.04 with k3, and a mean per sequence."""

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        super().__init__(config or ClippedPGLossConfig(reference_policy_kl_penalty=0.04, token_level_loss=False))
