"""Staleness of rollouts: how many optimizer steps behind the trained weights they were sampled."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.weight_versions import trained_tokens


def staleness(batch: BatchedDataDict[Any], version: int) -> torch.Tensor:
    """[N] int64: the version being trained minus the oldest version of a trained token, for the N rows that have one.

    Args:
        batch: rollouts with `token_versions`, `token_mask` and `sample_mask`.
        version: the policy's weight version.
    """
    newest = torch.iinfo(torch.int64).max
    oldest = torch.where(trained_tokens(batch), batch["token_versions"], newest).amin(-1)
    return version - oldest[oldest < newest]


def staleness_metrics(batch: BatchedDataDict[Any], version: int) -> dict[str, float]:
    """`staleness/mean` and `staleness/max` over rows; none for rows that were not sampled, such as answers of the data."""
    if "token_versions" not in batch:
        return {}
    lags = staleness(batch, version)
    return {"staleness/mean": float(lags.double().mean()), "staleness/max": float(lags.max())} if len(lags) else {}
