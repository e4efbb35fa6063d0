"""The clipped policy-gradient loss, in all forms of `ClippedPGLossConfig`.

    clip            PPO, https://arxiv.org/abs/1707.06347, equation 7
    clip-higher     separate bounds: DAPO, https://arxiv.org/abs/2503.14476, equation 10
    dual clip       https://arxiv.org/abs/1912.09729, equation 5
    GSPO            one ratio per sequence: https://arxiv.org/abs/2507.18071, equations 5 and 7; in its GSPO-token form,
                    equations 13 and 14, which is the same if the advantages of a sequence are equal
    CISPO           -sg(clip(ratio)) · A · log p: https://arxiv.org/abs/2506.13585, equations 4 and 5
    REINFORCE       -A · log p
    means           over tokens (DAPO), of sequence means (GRPO, https://arxiv.org/abs/2402.03300, equation 3), or of sequence
                    sums divided by a constant (Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2)
    KL              in the loss: GRPO, equation 3; a KL in the reward is computed by the algorithm
    decoupled PPO   https://arxiv.org/abs/2110.00641, for older rollouts: with `use_importance_sampling_correction`

Losses with other terms are in `trust_regions.py`.

Notation: B rows, T tokens. All quantities are in nats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction, LossType, Reduction
from rl_train.algorithms.losses.config import ClippedPGLossConfig, GRPOLossConfig, PolicyGradientLossConfig
from rl_train.algorithms.losses.kl import by_weight_version, mismatch_metrics, ratio_metrics, reference_kl, sampling_weights
from rl_train.algorithms.losses.means import bounded_log_ratio, sequence_mean, sequence_ratio, token_mean


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the terms of a policy-gradient loss are computed from; all tensors are [B, T]."""

    logprobs: torch.Tensor
    """log p of the current policy, with the gradient."""
    compared: torch.Tensor
    """log p of the policy that the ratio compares with."""
    log_ratio: torch.Tensor
    """`logprobs - compared` with the gradient, within `LOG_RATIO_BOUND`; 0.0 on tokens that are not trained."""
    advantages: torch.Tensor
    """float32."""
    mask: torch.Tensor
    """`token_mask * sample_mask`, float32."""
    data: BatchedDataDict[Any]
    """All columns of the microbatch."""


class PolicyGradientLossFn(LossFunction):
    """Mean of a term per token, plus the weighted KL to the reference policy; base of all policy-gradient losses.

    A subclass defines the term, `_surrogate`, and `_ratio` if it has another importance ratio. The mean is over the trained
    tokens, or the rows, of one optimizer step on all ranks.

    ratio = exp(log p now - log p before the step), with the difference clamped to plus and minus 20 nats (`LOG_RATIO_BOUND`).
    With `on_policy` the two are equal, so `prev_logprobs` is not needed and the ratio is 1 with the gradient of log p. With
    `ratio_to: sampler`, the log-probability of the sampler replaces that before the step in either case.

    Attributes:
        needs_advantages: whether the terms that this class defines are 0 on tokens with advantage 0, so that rows without
            another advantage need not be computed. Not inherited: a class that overrides a term states it again.
    """

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {
        "ratio/min": "min",
        "ratio/max": "max",
        "mismatch/max": "max",
        **dict.fromkeys(("ratio/mean", "ratio/clipped_frac", "entropy/sampled"), "token_mean"),
        **dict.fromkeys(("mismatch/kl", "mismatch/mult_prob_error", "mismatch/weight_mean"), "token_mean"),
        **dict.fromkeys(("mismatch/truncated_frac", "mismatch/masked_frac"), "token_mean"),
        **dict.fromkeys(("staleness/kl", "staleness/token_frac"), "token_mean"),
    }
    needs_advantages: ClassVar[bool] = True

    def __init__(self, config: PolicyGradientLossConfig) -> None:
        self.config = config
        self.loss_type = LossType.TOKEN_LEVEL if self.config.token_level_loss else LossType.SEQUENCE_LEVEL

    @property
    def has_kl_penalty(self) -> bool:
        """Whether the KL to the reference policy is part of this loss."""
        return self.config.reference_policy_kl_penalty > 0 and not self.config.use_kl_in_reward

    @property
    def required_keys(self) -> frozenset[str]:
        """`advantages`, `generation_logprobs`, and what the ratio and the penalty compare with."""
        keys = {"advantages", "generation_logprobs"}
        if not self.on_policy and self.config.ratio_to == "policy":
            keys.add("prev_logprobs")
        if self.has_kl_penalty:
            keys.add("reference_policy_logprobs")
        return frozenset(keys)

    @property
    def optional_keys(self) -> frozenset[str]:
        """`stale_mask`, by which metrics are split, see `mismatch_metrics`."""
        return frozenset({"stale_mask"})

    def reported_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return by_weight_version(metrics)

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Rows with a trained token whose advantage is not 0; all with a KL in the loss or with other terms."""
        if self.has_kl_penalty or not all(_definer(type(self), term).get("needs_advantages") for term in _TERMS):
            return None
        trained = (data["token_mask"] * data["sample_mask"].unsqueeze(-1)) > 0
        needed: torch.Tensor = ((data["advantages"] != 0) & trained).any(dim=-1)
        return needed

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics from `advantages` [B, T] and log-probabilities [B, T], float32; see `LossFunction`."""
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        sampled, to_sampler = data["generation_logprobs"], self.config.ratio_to == "sampler"
        previous = next_token_logprobs.detach() if self.on_policy else sampled if to_sampler else data["prev_logprobs"]
        compared = sampled if to_sampler else previous
        log_ratio = bounded_log_ratio(next_token_logprobs, compared, mask)
        tokens = Tokens(
            logprobs=next_token_logprobs,
            compared=compared,
            log_ratio=log_ratio,
            advantages=data["advantages"],
            mask=mask,
            data=data,
        )
        metrics: dict[str, torch.Tensor] = {}

        ratio = self._ratio(tokens)
        per_token, clipped = self._surrogate(tokens, ratio)
        if self.config.use_importance_sampling_correction:
            weights, metrics = sampling_weights(previous, sampled, mask, self.config, global_valid_toks)
            per_token = per_token * weights
        loss = self._mean(per_token, mask, global_valid_seqs, global_valid_toks)
        metrics["loss/policy"] = loss.detach()
        if self.has_kl_penalty:
            kl = reference_kl(next_token_logprobs, data["reference_policy_logprobs"], self.config)
            penalty = self._mean(kl, mask, global_valid_seqs, global_valid_toks)
            loss = loss + self.config.reference_policy_kl_penalty * penalty
            metrics["kl/reference"] = penalty.detach()

        if self.on_policy or not to_sampler:  # otherwise, the log-probabilities before the step are unknown
            metrics |= mismatch_metrics(previous, sampled, mask, global_valid_toks, stale=data.get("stale_mask"))
        metrics |= ratio_metrics(ratio.detach(), clipped, mask, global_valid_toks)
        metrics["entropy/sampled"] = token_mean(-next_token_logprobs.detach(), mask, global_valid_toks)
        return loss, metrics

    def _ratio(self, tokens: Tokens) -> torch.Tensor:
        """[B, T] the importance ratio."""
        return tokens.log_ratio.exp()

    @abstractmethod
    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T] the term of each token; and [B, T] bool: where a bound takes effect, None if the loss has no bounds."""

    def _mean(self, values: torch.Tensor, mask: torch.Tensor, seqs: torch.Tensor, toks: torch.Tensor) -> torch.Tensor:
        if self.loss_type is LossType.TOKEN_LEVEL:
            return token_mean(values, mask, toks)  # the sum over trained tokens / their number in the global batch
        return sequence_mean(values, mask, seqs, constant_length=self.config.constant_length_normalizer)


_TERMS = ("__call__", "_ratio", "_surrogate", "_mean")
"""Methods that determine which rows have a gradient."""


def _definer(loss_type: type, name: str) -> Mapping[str, Any]:
    """The attributes of the class that a method of a loss comes from."""
    return next(vars(base) for base in loss_type.__mro__ if name in vars(base))


class ClippedPGLossFn(PolicyGradientLossFn):
    """-min(ratio · A, clip(ratio) · A) at each trained token, plus the weighted KL to the reference policy.

    The default of GRPO. The ratio is clipped to 1 - `ratio_clip_min` and 1 + `ratio_clip_max` (0.2 by default).
    """

    needs_advantages: ClassVar[bool] = True
    config: ClippedPGLossConfig

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        super().__init__(config or ClippedPGLossConfig())

    def _ratio(self, tokens: Tokens) -> torch.Tensor:
        if not self.config.sequence_level_importance_ratios:
            return super()._ratio(tokens)
        return sequence_ratio(tokens.log_ratio, tokens.mask)

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        config, advantages = self.config, tokens.advantages
        above, below = ratio > 1.0 + config.ratio_clip_max, ratio < 1.0 - config.ratio_clip_min
        # CISPO clips regardless of the sign of the advantage; min() does not clip if that would raise the objective.
        outside = above | below if config.use_cispo else (above & (advantages > 0)) | (below & (advantages < 0))
        if config.disable_ppo_ratio:
            return -advantages * tokens.logprobs, outside
        clipped = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
        if config.use_cispo:
            return -advantages * clipped.detach() * tokens.logprobs, outside
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if config.ratio_clip_c is not None:
            bound = torch.minimum(loss, -advantages * config.ratio_clip_c)
            loss = torch.where(advantages < 0, bound, loss)
        return loss, outside


class GRPOLossFn(ClippedPGLossFn):
    """The loss `grpo`, with the defaults of the GRPO paper: a KL penalty of 0.04 with k3, and a mean per sequence."""

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        super().__init__(config or GRPOLossConfig())
