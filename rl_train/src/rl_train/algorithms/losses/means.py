"""Sums and means over trained tokens, divided by global counts, and bounded logarithms of ratios; for all losses."""

from __future__ import annotations

from collections.abc import Mapping

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


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] the geometric mean of the ratios of each row, whose gradient at a token is the ratio times that of its log-ratio.

    This is GSPO-token, https://arxiv.org/abs/2507.18071, equation 14: a mean over the tokens of a row has the gradient of the
    ratio of the row.

    Args:
        log_ratio: [B, T], in nats.
        mask: as `token_mean`.
    """
    return (row_means(log_ratio, mask).detach().unsqueeze(-1) + (log_ratio - log_ratio.detach())).exp()


_LEAST_SHARE = 1e-6
"""A share is a sum of float32 numbers, so that of no token may differ from 0 by their rounding."""


def divided_by_shares(metrics: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with sums over some of the tokens or rows as means over these; those over none are left out.

    Args:
        metrics: reduced over a step or a validation set.
        shares: the fraction of the trained tokens or rows that a metric covers, for metrics that do not cover all of them.
    """
    known = {name: value for name, value in metrics.items() if shares.get(name, 1.0) > _LEAST_SHARE}
    return {name: value / shares.get(name, 1.0) for name, value in known.items()}


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values * mask`, but 0.0 instead of NaN for infinities with mask 0."""
    return torch.where(mask > 0, values * mask, torch.zeros_like(values))
