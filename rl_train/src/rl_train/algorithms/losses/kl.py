"""Two policies compared by tokens that one of them sampled: estimates of their KL, importance weights, and mismatch metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from rl_train.algorithms.losses.config import PolicyGradientLossConfig
from rl_train.algorithms.losses.means import LOG_RATIO_BOUND, bounded_log_ratio, divided_by_shares, row_means, token_mean

KLType = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: torch.Tensor,
    logprobs_reference: torch.Tensor,
    kl_type: KLType = "k3",
    *,
    input_clamp_value: float | None = None,
    output_clamp_value: float | None = None,
) -> torch.Tensor:
    """Estimates KL(p || q) at each token that p sampled; r = log q - log p.

    Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html:

        k1 = -r                unbiased, high variance, may be negative; as a loss its expected gradient is zero
        k2 = r² / 2            biased, low variance; as a loss its gradient is that of KL(p || q) in expectation
        k3 = exp(r) - 1 - r    unbiased, low variance, never negative; as a loss its gradient is that of KL(q || p)

    As a penalty in the reward, an estimator k has the gradient E[k ∇log p]. That of k1 is ∇KL(p || q). k2 and k3 are also
    positive if q is above p, so their gradients push p away from q.

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


def reference_kl(logprobs: torch.Tensor, logprobs_reference: torch.Tensor, config: PolicyGradientLossConfig) -> torch.Tensor:
    """`calculate_kl` of the policy to its reference, with the estimator and clamps of the section `loss_fn`."""
    return calculate_kl(
        logprobs,
        logprobs_reference,
        config.kl_estimator,
        input_clamp_value=config.kl_input_clamp_value,
        output_clamp_value=config.kl_output_clamp_value,
    )


def sampling_weights(
    previous: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    config: PolicyGradientLossConfig,
    global_valid_toks: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights that correct for the difference between trainer and sampler; arguments as `mismatch_metrics`.

    Two backends never compute exactly the same log-probabilities, so samples come from a slightly different distribution than
    the trained policy; tokens that older weights sampled also differ by the optimizer steps since then. With
    w = p_trainer / p_sampler at each sampled token, where p_trainer is that of the weights before the step:

        tis           min(w, high)                                 https://fengyao.notion.site/off-policy-rl
        icepop        w if low <= w <= high, else 0             https://arxiv.org/abs/2510.18855
        seq-mask-tis  w in sequences with a geometric mean of w between low and high, else 0

    Masked tokens still count in the mean: they are zeros, and do not reduce the divisor.

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


def by_weight_version(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics of a step, those of `mismatch_metrics` as means over the tokens that they cover, or left out without any."""
    if "staleness/token_frac" not in metrics:
        return metrics
    stale = metrics["staleness/token_frac"]
    shares = {**dict.fromkeys(("mismatch/kl", "mismatch/mult_prob_error"), 1.0 - stale), "staleness/kl": stale}
    means = divided_by_shares(metrics, shares)
    if "mismatch/kl" not in means:  # the maximum over no token
        means.pop("mismatch/max", None)
    return means


def ratio_metrics(
    ratio: torch.Tensor, clipped: torch.Tensor | None, mask: torch.Tensor, global_valid_toks: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The ratios of a loss, and the fraction of tokens for which a bound takes effect.

    Args:
        ratio: [B, T] without a gradient.
        clipped: [B, T] bool; None if the loss has no bounds.
        mask: [B, T] float32, `token_mask * sample_mask`.
        global_valid_toks: scalar, number of trained tokens in the global batch.
    """
    trained, one = mask > 0, torch.ones_like(ratio)
    metrics = {
        "ratio/mean": token_mean(ratio, mask, global_valid_toks),
        "ratio/min": torch.where(trained, ratio, one).min(),
        "ratio/max": torch.where(trained, ratio, one).max(),
    }
    if clipped is not None:
        metrics["ratio/clipped_frac"] = token_mean(clipped.to(ratio.dtype), mask, global_valid_toks)
    return metrics
