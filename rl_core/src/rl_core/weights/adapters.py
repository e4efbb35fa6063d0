"""Low-rank adapters in a refit: the names of their tensors, and which of a manifest's names they are.

A layer whose frozen weight is `N.weight` computes W x + s B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685), with
`N.lora_A.weight` [rank, in], `N.lora_B.weight` [out, rank] and `N.lora_scale` [], the scale s. The scale is a tensor, so that
fingerprints cover it. In a manifest with adapters all other weights are frozen: an engine receives them once.
"""

from __future__ import annotations

from typing import Final

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest

LORA_A: Final = ".lora_A.weight"
"""End of the name of A, after that of its layer."""
LORA_B: Final = ".lora_B.weight"
"""End of the name of B."""
LORA_SCALE: Final = ".lora_scale"
"""End of the name of the scale s."""
_SUFFIXES: Final = (LORA_A, LORA_B, LORA_SCALE)


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name is part of an adapter."""
    return name.endswith(_SUFFIXES)


def adapters_in(manifest: RefitManifest) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors of adapters, in the same order."""
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in manifest.items() if is_adapter(name)}


def adapter_ranks(manifest: RefitManifest) -> dict[str, int]:
    """Name of each adapted layer to the rank of its adapter.

    Raises:
        WeightSyncError: one of the three tensors of a layer is missing.
    """
    adapters = adapters_in(manifest)
    layers = dict.fromkeys(name.removesuffix(suffix) for name in adapters for suffix in _SUFFIXES if name.endswith(suffix))
    if missing := [layer + suffix for layer in layers for suffix in _SUFFIXES if layer + suffix not in adapters]:
        raise WeightSyncError(f"The policy does not send {missing[0]!r} of an adapter ({len(missing)} such tensors).")
    return {layer: adapters[layer + LORA_A][0][0] for layer in layers}
