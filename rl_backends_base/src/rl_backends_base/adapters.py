"""Low-rank adapters of a model's linear layers and fused experts: each computes W x + s B A x and keeps its weight W unchanged.

In a sampling model, the adapter of a linear layer is added in a forward hook, so the layer keeps its class, its name and any
faster forward. As in a policy with adapters, their product is computed in their own data type, and the sum is rounded once to
that of the layer. `AdaptedWeight` does the same for a tensor of experts, which it replaces in each call of their module, in
sampling models and in policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rl_backends_base.checkpoint_names import OF_TENSOR
from rl_core.errors import WeightSyncError

EXPERT_AXES: Final = 3
"""Number of axes of a tensor that stacks the matrices of all experts of a layer."""
_ALIGNED: Final = 8
"""Kernels of grouped products read rows whose length is a multiple of 16 bytes."""


class Factor(nn.Module):
    """One matrix of an adapter, [rank, in] or [out, rank], float32."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device), requires_grad=False)


def add_adapters(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Give layers of a model an adapter, with the names of `rl_core.weights.adapters`; those that have one keep it.

    The adapters of a tensor T of experts are those of a layer `T_lora`: A [experts * rank, in] and B [out, rank * experts].

    Args:
        model: the model; its linear layers are `nn.Linear`, or `Conv1D` of Transformers.
        ranks: name of each layer to the rank of its adapter, which is experts * rank for experts.

    Raises:
        WeightSyncError: a name is not that of a linear layer or a tensor of experts.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    fused = {f"{name}{OF_TENSOR}": name for name in fused_experts(model)}
    if unknown := [name for name in ranks if name not in linear and name not in fused]:
        raise WeightSyncError(
            f"The policy sends an adapter of {unknown[0]!r}, but the engine's {type(model).__name__} has no linear layer of "
            f"that name ({len(unknown)} such layers). Set policy.generation.lora to merged."
        )
    for name, rank in ranks.items():
        if name in fused:
            _add_to_experts(model, fused[name], rank)
            continue
        layer: Any = linear[name]
        if hasattr(layer, "lora_A"):
            if len(layer.lora_A.weight) == rank:
                continue
            layer.lora_handle.remove()
        size_in, size_out = layer.weight.shape[::-1] if isinstance(layer, nn.Linear) else layer.weight.shape
        _give_factors(layer, rank, size_in, size_out, layer.weight.device)
        added = AddedAdapter(layer.lora_A.weight, layer.lora_B.weight, layer.lora_scale)
        layer.lora_handle = layer.register_forward_hook(added)


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that stack the matrices of the experts of a layer, [experts, out, in] or [experts, in, out], by name."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        # Convolutions have three axes too, and embeddings of positions have a first one of length 1.
        if parameter.ndim == EXPERT_AXES and len(parameter) > 1 and not type(module).__module__.startswith("torch.nn")
    }


def _give_factors(layer: Any, rank: int, size_in: int, size_out: int, device: torch.device) -> None:
    layer.lora_A, layer.lora_B = Factor(rank, size_in, device), Factor(size_out, rank, device)
    layer.lora_scale = nn.Parameter(torch.ones((), dtype=torch.float32, device=device), requires_grad=False)


def _add_to_experts(model: nn.Module, name: str, rank: int) -> None:
    owner, _, key = name.rpartition(".")
    experts: Any = model.get_submodule(owner)
    factors: Any = getattr(experts, key + OF_TENSOR, None)
    if factors is None:
        factors = nn.Module()
        experts.add_module(key + OF_TENSOR, factors)
        replace_in_calls(experts, key, partial(_of_factors, experts, key, factors))
    elif len(factors.lora_A.weight) == rank:
        return
    weight = experts.get_parameter(key)
    size_in, size_out = weight.shape[1:] if is_transposed(experts) else (weight.shape[2], weight.shape[1])
    _give_factors(factors, rank, size_in, size_out, weight.device)


def _of_factors(experts: nn.Module, key: str, factors: Any) -> AdaptedWeight:
    adapter = factors.lora_A.weight, factors.lora_B.weight
    return AdaptedWeight.of(experts, experts.get_parameter(key), *adapter, scale=factors.lora_scale)


def replace_in_calls(module: nn.Module, key: str, replacement: Callable[[], object | None]) -> None:
    """Let `module` read what `replacement` returns, unless it is None, where it reads its parameter `key`, which it keeps."""
    module.register_forward_pre_hook(partial(_begin, key=key, replacement=replacement))
    module.register_forward_hook(partial(_end, key=key), always_call=True)


def _begin(module: nn.Module, _: object, *, key: str, replacement: Callable[[], object | None]) -> None:
    _end(module, key=key)  # of a call that was interrupted
    if (value := replacement()) is not None:
        vars(module)[key] = value  # Python looks there before torch looks among the parameters.


def _end(module: nn.Module, *_: object, key: str) -> None:
    vars(module).pop(key, None)


def is_transposed(experts: nn.Module) -> bool:
    """Whether tensors of experts are stored as [experts, in, out], as those of gpt-oss are."""
    return bool(getattr(experts, "is_transposed", False))


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """A tensor of experts with its adapters, W + s L R, which is not computed for grouped products: x W + s (x L) R.

    It stands in for the tensor while the code of the experts runs. Any other use computes the sum, of the experts that are
    read, in float32 and rounded once.

    Attributes:
        weight: W [experts, m, n].
        left: L [experts, m, rank], float32.
        right: R [experts, rank, n], float32.
        scale: s.
    """

    weight: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    scale: torch.Tensor | float

    @classmethod
    def of(
        cls, experts: nn.Module, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: torch.Tensor | float
    ) -> AdaptedWeight:
        """The weight with adapters in the layout of peft.

        Args:
            experts: the module that has the tensor.
            weight: the tensor.
            a: A of all experts [experts * rank, in]; the rows of an expert are consecutive.
            b: B of all experts [out, rank * experts]; the columns of a rank are consecutive.
            scale: s.
        """
        of_experts = a.view(len(weight), -1, a.shape[1]), b.view(len(b), -1, len(weight)).permute(2, 0, 1)
        left, right = (each.mT for each in of_experts) if is_transposed(experts) else reversed(of_experts)
        return cls(weight, left, right, scale)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for a function with such an argument."""
        kwargs = kwargs or {}
        if "grouped_mm" in getattr(func, "__name__", "") and isinstance(args[1], cls) and kwargs.get("bias") is None:
            return args[1]._grouped(func, args[0], *args[2:], **kwargs)
        return func(*(_total(each) for each in args), **{name: _total(each) for name, each in kwargs.items()})

    def _grouped(self, multiply: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        left, right = self.left.to(dtype), self.right.to(dtype)
        if padding := -left.shape[2] % _ALIGNED:
            left, right = functional.pad(left, (0, padding)), functional.pad(right, (0, 0, 0, padding))
        left, right = (each if each.mT.is_contiguous() else each.contiguous() for each in (left, right))
        reduced = multiply(x.to(dtype), left, *args, **kwargs)
        added = multiply(reduced * self.scale, right, *args, **kwargs)
        output = multiply(x, self.weight, *args, **kwargs)
        return (output + added).to(output.dtype)

    def total(self) -> torch.Tensor:
        """W + s L R of all experts, a new tensor."""
        return torch.stack([self[expert] for expert in range(len(self.weight))])

    def __getitem__(self, experts: Any) -> torch.Tensor:
        weight = self.weight[experts]
        return (weight + self.scale * (self.left[experts] @ self.right[experts])).to(weight.dtype)

    def transpose(self, first: int, second: int) -> AdaptedWeight | torch.Tensor:
        """With the last two axes exchanged."""
        if {first % EXPERT_AXES, second % EXPERT_AXES} != {1, 2}:
            return self.total().transpose(first, second)
        return AdaptedWeight(self.weight.mT, self.right.mT, self.left.mT, self.scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight if name in ("shape", "dtype", "device", "ndim") else self.total(), name)


def _total(argument: Any) -> Any:
    return argument.total() if isinstance(argument, AdaptedWeight) else argument


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
