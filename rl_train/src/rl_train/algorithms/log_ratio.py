"""Logarithms of probability ratios, bounded so that their exponentials are finite numbers."""

from __future__ import annotations

import torch

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
