"""Pads shorter rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def right_padded(part: torch.Tensor, width: int, *, pad_value: float = 0.0) -> torch.Tensor:
    """A tensor [B, T, ...], padded on the right along axis 1 to [B, `width`, ...]."""
    return pad(part, (*(0, 0) * (part.ndim - 2), 0, width - part.shape[1]), value=pad_value)


def cat_right_padded(parts: Sequence[torch.Tensor], *, pad_value: float) -> torch.Tensor:
    """Concatenate tensors [B, T, ...], padded on the right along axis 1, or [B]: [sum of B, largest T, ...]."""
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([right_padded(part, width, pad_value=pad_value) for part in parts])
