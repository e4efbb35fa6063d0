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

Notation: B rows, T tokens. All quantities are in nats.

Differences between the log-probabilities of trainer and sampler, and importance weights that correct for them.

Two backends never compute exactly the same log-probabilities, so samples come from a slightly different distribution than the
trained policy. Tokens that older weights sampled also differ by the optimizer steps since then. With
w = p_trainer / p_sampler at each sampled token, where p_trainer is that of the weights before the step:

    tis           min(w, high)                                 https://fengyao.notion.site/off-policy-rl
    icepop        w if low <= w <= high, else 0             https://arxiv.org/abs/2510.18855
    seq-mask-tis  w in sequences with a geometric mean of w between low and high, else 0

log w is clamped to plus and minus 20 nats (`LOG_RATIO_BOUND`), so that no weight is infinite. Masked tokens still
count in the mean: they are zeros, and do not reduce the divisor.

Estimators of the KL divergence between two policies from the tokens that one of them sampled; pure functions.

With x ~ p and r = log q(x) - log p(x) (Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html):

    k1 = -r                unbiased, high variance, may be negative; as a loss its expected gradient is zero
    k2 = r² / 2            biased, low variance; as a loss its gradient is that of KL(p || q) in expectation
    k3 = exp(r) - 1 - r    unbiased, low variance, never negative; as a loss its gradient is that of KL(q || p) in expectation

As a penalty in the reward, an estimator k has the gradient E[k ∇log p]. That of k1 is ∇KL(p || q). k2 and k3 are also positive
if q is above p, so their gradients push p away from q.

Logarithms of probability ratios, bounded so that their exponentials are finite numbers.

Sums over trained tokens, divided by global counts; all losses are normalized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction, LossType, Reduction
from rl_train.algorithms.losses.config import ClippedPGLossConfig, GRPOLossConfig


class ClippedPGLossFn(LossFunction):
    """-min(ratio · A, clip(ratio) · A) at each trained token, plus the weighted KL to the reference policy.

    ratio = exp(log p now - log p before the step), with the difference clamped to plus and minus 20 nats (`LOG_RATIO_BOUND`).
    With `on_policy` the two are equal, so `prev_logprobs` is not needed and the ratio is 1 with the gradient of log p.
    With `ratio_to: sampler`, the log-probability of the sampler replaces that before the step; `prev_logprobs` is not needed.

    Attributes:
        has_stale_tokens: whether the batch has `stale_mask`; metrics are then split by it, see `mismatch_metrics`.
    """

    has_stale_tokens: bool = False

    metric_reductions: ClassVar[Mapping[str, Reduction]] = {
        "ratio/mean": "token_mean",
        "ratio/min": "min",
        "ratio/max": "max",
        "ratio/clipped_frac": "token_mean",
        "entropy/sampled": "token_mean",
        "mismatch/kl": "token_mean",
        "mismatch/mult_prob_error": "token_mean",
        "mismatch/max": "max",
        "mismatch/weight_mean": "token_mean",
        "mismatch/truncated_frac": "token_mean",
        "mismatch/masked_frac": "token_mean",
        "staleness/kl": "token_mean",
        "staleness/token_frac": "token_mean",
    }

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        self.config = config or ClippedPGLossConfig()
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
        if self.has_stale_tokens:
            keys.add("stale_mask")
        if self.has_kl_penalty:
            keys.add("reference_policy_logprobs")
        return frozenset(keys)

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """Rows with a trained token whose advantage is not 0; all rows with a KL penalty in the loss.

        Also all rows in a subclass that computes the loss differently, because its terms are unknown here.
        """
        if self.has_kl_penalty or any(getattr(type(self), name) is not getattr(ClippedPGLossFn, name) for name in _TERMS):
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
        ratio = self._ratio(next_token_logprobs, sampled if to_sampler else previous, mask)

        per_token = self._surrogate(next_token_logprobs, ratio, data["advantages"])
        metrics: dict[str, torch.Tensor] = {}
        if self.on_policy or not to_sampler:  # otherwise, the log-probabilities before the step are unknown
            stale = data["stale_mask"] if self.has_stale_tokens else None
            metrics = mismatch_metrics(previous, sampled, mask, global_valid_toks, stale=stale)
        if self.config.use_importance_sampling_correction:
            weights, weight_metrics = sampling_weights(previous, sampled, mask, self.config, global_valid_toks)
            per_token = per_token * weights
            metrics |= weight_metrics
        loss = self._mean(per_token, mask, global_valid_seqs, global_valid_toks)
        metrics["loss/policy"] = loss.detach()
        if self.has_kl_penalty:
            kl = reference_kl(next_token_logprobs, data["reference_policy_logprobs"], self.config)
            penalty = self._mean(kl, mask, global_valid_seqs, global_valid_toks)
            loss = loss + self.config.reference_policy_kl_penalty * penalty
            metrics["kl/reference"] = penalty.detach()
        metrics |= self._ratio_metrics(ratio.detach(), data["advantages"], mask, global_valid_toks)
        metrics["entropy/sampled"] = token_mean(-next_token_logprobs.detach(), mask, global_valid_toks)
        return loss, metrics

    def _ratio(self, logprobs: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        log_ratio = bounded_log_ratio(logprobs, previous, mask)
        if self.config.sequence_level_importance_ratios:
            # The value of the sequence with the gradient of each token: GSPO-token.
            log_ratio = row_means(log_ratio, mask).detach().unsqueeze(-1) + (log_ratio - log_ratio.detach())
        return log_ratio.exp()

    def _surrogate(self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.disable_ppo_ratio:
            return -advantages * logprobs
        clipped = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
        if config.use_cispo:
            return -advantages * clipped.detach() * logprobs
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if config.ratio_clip_c is not None:
            bound = torch.minimum(loss, -advantages * config.ratio_clip_c)
            loss = torch.where(advantages < 0, bound, loss)
        return loss

    def _mean(self, values: torch.Tensor, mask: torch.Tensor, seqs: torch.Tensor, toks: torch.Tensor) -> torch.Tensor:
        if self.loss_type is LossType.TOKEN_LEVEL:
            return token_mean(values, mask, toks)
        return sequence_mean(values, mask, seqs, constant_length=self.config.constant_length_normalizer)

    def _ratio_metrics(
        self, ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, toks: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        trained = mask > 0
        above, below = ratio > 1.0 + self.config.ratio_clip_max, ratio < 1.0 - self.config.ratio_clip_min
        # CISPO clips regardless of the sign of the advantage; min() does not clip if that would raise the objective.
        clipped = above | below if self.config.use_cispo else (above & (advantages > 0)) | (below & (advantages < 0))
        one = torch.ones_like(ratio)
        return {
            "ratio/mean": token_mean(ratio, mask, toks),
            "ratio/min": torch.where(trained, ratio, one).min(),
            "ratio/max": torch.where(trained, ratio, one).max(),
            "ratio/clipped_frac": token_mean(clipped.to(ratio.dtype), mask, toks),
        }


_TERMS = ("__call__", "_ratio", "_surrogate", "_mean")
"""Methods that determine which rows have a gradient."""


class GRPOLossFn(ClippedPGLossFn):
    """`ClippedPGLossFn` with the defaults of the GRPO paper: a KL penalty of 0.04 with k3, and a mean per sequence."""

    def __init__(self, config: ClippedPGLossConfig | None = None) -> None:
        super().__init__(config or GRPOLossConfig())


def reference_kl(logprobs: torch.Tensor, logprobs_reference: torch.Tensor, config: ClippedPGLossConfig) -> torch.Tensor:
    """`calculate_kl` of the policy to its reference, with the estimator and clamps of the section `loss_fn`."""
    return calculate_kl(
        logprobs,
        logprobs_reference,
        config.kl_estimator,
        input_clamp_value=config.kl_input_clamp_value,
        output_clamp_value=config.kl_output_clamp_value,
    )


def mismatch_metrics(
    previous: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    global_valid_toks: torch.Tensor,
    *,
    stale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Mismatch of sampler and policy: contributions to means over trained tokens, and `mismatch/max`, reduced by max.

    With `stale`, the means must be divided by the share of the tokens that they cover (`by_weight_version`).

    Args:
        previous: [B, T] log p under the policy before the step, in nats.
        sampled: [B, T] log p as the sampler reported it.
        mask: [B, T] float32, `token_mask * sample_mask`.
        global_valid_toks: scalar, number of trained tokens in the global batch.
        stale: [B, T] float32, 1 on tokens that older weights sampled, which `staleness/kl` covers instead of `mismatch/*`.
    """
    difference, kl = (previous - sampled).abs(), calculate_kl(sampled, previous, "k3")
    current, metrics = mask, {}
    if stale is not None:
        current = mask * (1.0 - stale)
        metrics["staleness/kl"] = token_mean(kl, mask * stale, global_valid_toks)
        metrics["staleness/token_frac"] = token_mean(stale, mask, global_valid_toks)
    return metrics | {
        "mismatch/kl": token_mean(kl, current, global_valid_toks),
        "mismatch/mult_prob_error": token_mean(difference.clamp(max=LOG_RATIO_BOUND).exp(), current, global_valid_toks),
        "mismatch/max": torch.where(current > 0, difference, torch.zeros_like(difference)).max(),
    }


def sampling_weights(
    previous: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    config: ClippedPGLossConfig,
    global_valid_toks: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight of each token, and statistics; arguments as `mismatch_metrics`.

    Returns:
        [B, T] weights without a gradient, and contributions to `mismatch/weight_mean` and to `mismatch/truncated_frac` (tokens
        clipped to a bound) or `mismatch/masked_frac` (masked tokens). They cover all trained tokens, of any weights.
    """
    log_weight = bounded_log_ratio(previous, sampled, mask).detach()
    weight = log_weight.exp()
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        of_row = row_means(log_weight, mask).exp().unsqueeze(-1)
        outside = ((of_row < low) | (of_row > high)).expand_as(weight)
    else:
        outside = (weight < low) | (weight > high)
    if config.truncated_importance_sampling_type == "tis":
        bounded, name = weight.clamp(low, high), "mismatch/truncated_frac"
    else:
        bounded, name = weight.masked_fill(outside, 0.0), "mismatch/masked_frac"
    return bounded, {
        "mismatch/weight_mean": token_mean(bounded, mask, global_valid_toks),
        name: token_mean(outside.to(weight.dtype), mask, global_valid_toks),
    }


KLType = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: torch.Tensor,
    logprobs_reference: torch.Tensor,
    kl_type: KLType = "k3",
    *,
    input_clamp_value: float | None = None,
    output_clamp_value: float | None = None,
) -> torch.Tensor:
    """Estimate KL(p || q) at each token.

    Args:
        logprobs: log p of the sampled tokens, any shape, in nats.
        logprobs_reference: log q of the same tokens.
        kl_type: the estimator.
        input_clamp_value: clamp r to plus and minus this value. With None, only k3 clamps r, to `LOG_RATIO_BOUND` (20), so
            that exp(r) is finite.
        output_clamp_value: clamp the estimate to plus and minus this value.

    Returns:
        The estimate per token, with the shape of `logprobs`, in nats.
    """
    if input_clamp_value is not None:
        log_ratio = bounded_log_ratio(logprobs_reference, logprobs, bound=input_clamp_value)
    elif kl_type == "k3":
        log_ratio = bounded_log_ratio(logprobs_reference, logprobs)
    else:
        log_ratio = logprobs_reference - logprobs
    if kl_type == "k1":
        kl = -log_ratio
    elif kl_type == "k2":
        kl = 0.5 * log_ratio.square()
    else:
        kl = torch.expm1(log_ratio) - log_ratio
    if output_clamp_value is not None:
        kl = kl.clamp(-output_clamp_value, output_clamp_value)
    return kl


LOG_RATIO_BOUND = 20.0
"""Nats. exp(20) is 4.9e8, above every bound of a loss, and its square fits into float32. exp(89) is infinite in float32, and
infinity times an advantage of zero is NaN."""


def bounded_log_ratio(
    logprobs: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None = None, *, bound: float = LOG_RATIO_BOUND
) -> torch.Tensor:
    """`logprobs - other`, clamped to plus and minus `bound`; a clamped entry has no gradient.

    Args:
        logprobs: any shape, in nats.
        other: the same shape.
        mask: the same shape; the result is 0.0 for entries with mask 0. None keeps every entry.
        bound: at most 80, so that the exponential fits into float32.
    """
    difference = logprobs - other
    if mask is not None:
        difference = torch.where(mask > 0, difference, 0.0)
    return difference.clamp(-bound, bound)


def token_mean(values: torch.Tensor, mask: torch.Tensor, global_valid_toks: torch.Tensor) -> torch.Tensor:
    """The contribution of this microbatch to the mean over all trained tokens.

    Args:
        values: [B, T].
        mask: [B, T] float32, `token_mask * sample_mask`.
        global_valid_toks: scalar, number of trained tokens in the global batch.
    """
    return masked(values, mask).sum() / global_valid_toks.clamp(min=1.0)


def sequence_mean(
    values: torch.Tensor, mask: torch.Tensor, global_valid_seqs: torch.Tensor, *, constant_length: float | None = None
) -> torch.Tensor:
    """The contribution of this microbatch to the mean over sequences of each sequence's mean over its trained tokens.

    Args:
        values: [B, T].
        mask: [B, T] float32, `token_mask * sample_mask`.
        global_valid_seqs: scalar, number of trained rows in the global batch.
        constant_length: divide each sequence's sum by this constant instead of the sequence's length, so that tokens of
            long and short answers have the same weight (Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2).
    """
    sums = masked(values, mask).sum(dim=-1)
    per_sequence = sums / mask.sum(dim=-1).clamp(min=1.0) if constant_length is None else sums / constant_length
    return per_sequence.sum() / global_valid_seqs.clamp(min=1.0)


def row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] sum of each row over its trained tokens; arguments as `token_mean`."""
    return masked(values, (mask > 0).to(values.dtype)).sum(dim=-1)


def row_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] mean of each row over its trained tokens, 0.0 if it has none; arguments as `token_mean`."""
    return row_sums(values, mask) / (mask > 0).sum(dim=-1).clamp(min=1)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values * mask`, but 0.0 instead of NaN for infinities with mask 0."""
    return torch.where(mask > 0, values * mask, torch.zeros_like(values))
