"""Estimates of the KL divergence between two policies from the tokens that one of them sampled."""

from __future__ import annotations

from typing import Literal

import torch

from rl_train.algorithms.losses.config import ClippedPGLossConfig
from rl_train.algorithms.losses.means import bounded_log_ratio

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


def reference_kl(logprobs: torch.Tensor, logprobs_reference: torch.Tensor, config: ClippedPGLossConfig) -> torch.Tensor:
    """`calculate_kl` of the policy to its reference, with the estimator and clamps of the section `loss_fn`."""
    return calculate_kl(
        logprobs,
        logprobs_reference,
        config.kl_estimator,
        input_clamp_value=config.kl_input_clamp_value,
        output_clamp_value=config.kl_output_clamp_value,
    )
