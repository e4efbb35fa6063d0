"""Pads shorter rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def cat_right_padded(parts: Sequence[torch.Tensor], *, pad_value: float) -> torch.Tensor:
    """Concatenate tensors [B, T, ...], padded on the right along axis 1, or [B]: [sum of B, largest T, ...]."""
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    inner = (0, 0) * (parts[0].ndim - 2)
    return torch.cat([pad(part, (*inner, 0, width - part.shape[1]), value=pad_value) for part in parts])
