"""Pads shorter rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cat_right_padded(parts: Sequence[torch.Tensor], *, pad_value: float) -> torch.Tensor:
    """Concatenate tensors [B, T, ...], padded on the right along axis 1, or [B]: [sum of B, largest T, ...]."""
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    if all(part.shape[1] == width for part in parts):
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), width, *parts[0].shape[2:])
    whole = parts[0].new_full(shape, pad_value)
    row = 0
    for part in parts:
        whole[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return whole
