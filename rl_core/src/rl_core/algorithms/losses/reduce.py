"""Sums over trained tokens, divided by global counts; the only place where a loss is normalised."""

from __future__ import annotations

import torch


def token_mean(values: torch.Tensor, mask: torch.Tensor, global_valid_toks: torch.Tensor) -> torch.Tensor:
    """This share of the mean over all trained tokens.

    Args:
        values: [B, T].
        mask: [B, T] float32, `token_mask * sample_mask`.
        global_valid_toks: scalar, the trained tokens of the global batch.
    """
    return masked(values, mask).sum() / global_valid_toks.clamp(min=1.0)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, global_valid_seqs: torch.Tensor) -> torch.Tensor:
    """This share of the mean over sequences of each sequence's mean over its trained tokens; arguments as `token_mean`."""
    per_sequence = masked(values, mask).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1.0)
    return per_sequence.sum() / global_valid_seqs.clamp(min=1.0)


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` where `mask`, 0.0 elsewhere; an infinity under a zero mask does not become NaN."""
    return torch.where(mask > 0, values * mask, torch.zeros_like(values))
