"""Digests of the weights that a rank trains: of all their bits, or of a fixed sample that costs little after each step."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from rl_core.weights.fingerprint import combine, natural_kind, tensor_digest, tensor_digests

_TENSORS = 64
"""Drawn at random: at equal distances, they could be only the first matrices of adapters, which the first step leaves."""
_ELEMENTS = 64
"""Elements of each sampled tensor, evenly spaced."""


def digest_of(weights: Iterable[tuple[str, torch.Tensor]], *, whole: bool) -> tuple[str, bool] | None:
    """The digest, and whether all weights in it are float32; None without weights.

    Args:
        weights: name and tensor of each weight or shard.
        whole: digest every element instead of a sample.
    """
    tensors = [(name, tensor.detach()) for name, tensor in weights if tensor.numel()]
    if not tensors:
        return None
    exact = all(tensor.dtype == torch.float32 for _, tensor in tensors)
    if whole:
        kind = natural_kind(tensors[0][1].device)
        return combine(tensor_digests(tensors, kind=kind), kind=kind), exact
    drawn = random.Random(0).sample(tensors, min(len(tensors), _TENSORS))
    sample = torch.cat([tensor.reshape(-1)[:: -(-tensor.numel() // _ELEMENTS)].float() for _, tensor in drawn])
    return tensor_digest(sample.cpu()), exact
