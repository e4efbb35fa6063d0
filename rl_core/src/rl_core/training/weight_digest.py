"""Digests of the weights that a rank trains: of all their bits, or of a fixed sample that costs little after each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rl_core.weights.fingerprint import combine, natural_kind, tensor_digest, tensor_digests

_TENSORS = 64
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
    spaced = range(0, len(tensors), -(-len(tensors) // _TENSORS))
    flat = [tensors[index][1].reshape(-1) for index in spaced]
    sample = torch.cat([one[:: -(-one.numel() // _ELEMENTS)].float() for one in flat])
    return tensor_digest(sample.cpu()), exact
