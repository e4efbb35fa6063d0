"""Logarithms of probability ratios, bounded so that their exponentials are finite numbers."""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0
"""Nats. exp(20) is 4.9e8, beyond every bound that a loss sets, and its square is still a float32. exp(89) is infinite in
float32, and infinity times an advantage of zero is not a number."""


def bounded_log_ratio(
    logprobs: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None = None, *, bound: float = LOG_RATIO_BOUND
) -> torch.Tensor:
    """`logprobs - other`, clamped to plus and minus `bound`; a clamped entry has no gradient.

    Args:
        logprobs: any shape, in nats.
        other: the same shape.
        mask: the same shape; the result is 0.0 where it is 0. None keeps every entry.
        bound: at most 80, so that the exponential is a float32.
    """
    difference = logprobs - other
    if mask is not None:
        difference = torch.where(mask > 0, difference, 0.0)
    return difference.clamp(-bound, bound)
