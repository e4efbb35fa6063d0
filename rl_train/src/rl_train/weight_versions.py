"""Tokens of a step that older weights sampled, and metrics that are means over these or over the other tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict

_CURRENT = ("mismatch/kl", "mismatch/mult_prob_error", "mismatch/max")
_LEAST_SHARE = 1e-6
"""A share is a sum of float32 numbers, so that of no token may differ from 0 by their rounding."""


def trained_tokens(data: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] bool: the tokens that a loss counts."""
    trained: torch.Tensor = (data["token_mask"] > 0) & (data["sample_mask"] > 0).unsqueeze(-1)
    return trained


def stale_mask(batch: BatchedDataDict[Any], version: int) -> torch.Tensor | None:
    """[B, T] float32: 1 on trained tokens that were sampled with other weights than those of `version`; None without any."""
    if "token_versions" not in batch:
        return None
    is_stale = trained_tokens(batch) & (batch["token_versions"] >= 0) & (batch["token_versions"] != version)
    return is_stale.float() if bool(is_stale.any()) else None


def by_weight_version(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, in which means over tokens of the current or of older weights are divided by their share.

    A metric without any token is left out. Metrics without `staleness/token_frac` are returned unchanged.
    """
    if "staleness/token_frac" not in metrics:
        return dict(metrics)
    stale = metrics["staleness/token_frac"]
    shares = dict.fromkeys(_CURRENT, 1.0 - stale) | {"staleness/kl": stale}
    known = {name: value for name, value in metrics.items() if shares.get(name, 1.0) > _LEAST_SHARE}
    return {name: value / shares.get(name, 1.0) if name != "mismatch/max" else value for name, value in known.items()}
