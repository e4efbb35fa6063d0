"""Low-rank adapters of the linear layers of a sampling model: each computes W x + s B A x and keeps its weight W unchanged.

The adapter is added in a forward hook, so the layer keeps its class, its name and any faster forward. As in a policy
with adapters, their product is computed in their own data type, and the sum is rounded once to that of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rl_core.errors import WeightSyncError


class Factor(nn.Module):
    """One matrix of an adapter, [rank, in] or [out, rank], float32."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device), requires_grad=False)


def add_adapters(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Give layers of a model an adapter, with the names of `rl_core.weights.adapters`; those that have one keep it.

    Args:
        model: the model; its linear layers are `nn.Linear`, or `Conv1D` of Transformers.
        ranks: name of each layer to the rank of its adapter.

    Raises:
        WeightSyncError: a name is not that of a linear layer.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if unknown := [name for name in ranks if name not in linear]:
        raise WeightSyncError(
            f"The policy sends an adapter of {unknown[0]!r}, but the engine's {type(model).__name__} has no linear layer of "
            f"that name ({len(unknown)} such layers). Set policy.generation.lora to merged."
        )
    for name, rank in ranks.items():
        layer: Any = linear[name]
        if hasattr(layer, "lora_A"):
            if len(layer.lora_A.weight) == rank:
                continue
            layer.lora_handle.remove()
        size_in, size_out = layer.weight.shape[::-1] if isinstance(layer, nn.Linear) else layer.weight.shape
        device = layer.weight.device
        layer.lora_A, layer.lora_B = Factor(rank, size_in, device), Factor(size_out, rank, device)
        layer.lora_scale = nn.Parameter(torch.ones((), dtype=torch.float32, device=device), requires_grad=False)
        added = AddedAdapter(layer.lora_A.weight, layer.lora_B.weight, layer.lora_scale)
        layer.lora_handle = layer.register_forward_hook(added)


@dataclass(frozen=True, eq=False)
class AddedAdapter:
    """Forward hook of an adapted layer. It holds the parameters, because finding them takes as long as a small product.

    Attributes:
        a: A [rank, in].
        b: B [out, rank].
        scale: s [].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: torch.Tensor

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add s B A x for `inputs` ([..., in],) to the layer's own `output` [..., out], in place."""
        reduced = functional.linear(inputs[0].to(torch.float32), self.a)
        return output.add_(functional.linear(reduced * self.scale, self.b))
