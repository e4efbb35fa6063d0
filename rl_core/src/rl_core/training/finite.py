"""Checks that all tensors of a checkpoint or of a weights file are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rl_core.errors import WeightSyncError
from rl_core.weights.disk import read_tensors


def first_non_finite(tensors: Iterable[tuple[str, torch.Tensor]], *, published: torch.dtype | None = None) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None; reads each tensor once.

    Args:
        tensors: name and tensor; for a sharded tensor, this rank's shard is read.
        published: the dtype to which the tensors will be rounded, which can turn finite numbers into infinite ones.
    """
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == 0 or not local.is_floating_point():
            continue
        extremes = torch.stack(torch.aminmax(local.detach()))  # a NaN anywhere makes both NaN
        if published is not None:
            extremes = extremes.to(published)
        if not all(math.isfinite(value) for value in extremes.tolist()):
            return name
    return None


def refuse_non_finite_file(path: Path) -> None:
    """Check a file of weights before an engine loads it.

    Raises:
        WeightSyncError: a tensor has a NaN or an infinity, or the file cannot be read.
    """
    name = first_non_finite(read_tensors(str(path), torch.device("cpu")).items())
    if name is not None:
        raise WeightSyncError(
            f"Weights are rejected: {name} has values that are NaN or infinite. The policy has diverged: continue from an "
            "earlier checkpoint with a lower learning rate."
        )
