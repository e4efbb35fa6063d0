"""Packs the weights of linear layers for oneDNN while a model samples on a CPU.

Decoding multiplies a few rows by every weight once per token. torch's plain product packs the weight again each time, which in
float32 costs more than the product itself; here it is packed once per call and freed afterwards. Layers that read the same
input (queries, keys and values; gate and up projection) become one product. Results are equal up to the order of float32 sums,
in which bfloat16 products are summed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeGuard

import torch
from torch import nn

from rl_backends_base import AddedAdapter
from rl_backends_hf.torch_internals import has_bfloat16_products, linear_pointwise, reorder_linear_weight

_MIN_STEPS: Final = 12
"""Minimum number of decoding steps for packing, which takes about as long as two to four unpacked steps."""
_MAX_PACKED_BYTES: Final = 4 * 2**30
"""Maximum size of packed copies; further layers stay unpacked, so that a large model does not need twice its memory."""
_SAME_INPUT: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that read the same input in the models of Transformers."""


@contextmanager
def packed_linears(model: nn.Module, *, rows: int, steps: int) -> Iterator[None]:
    """Run the linear layers of `model` with packed copies of their weights while the block runs.

    On a CPU without bfloat16 instructions, a bfloat16 model is computed in float32 and rounded once per layer, as its emulated
    kernels do at a tenth of the speed.

    Args:
        model: any module; layers on other devices, of other types, or with a custom forward are not changed.
        rows: number of rows of the products.
        steps: approximate number of steps.
    """
    packed: list[nn.Linear] = []
    try:
        if steps >= _MIN_STEPS and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
            budget = _MAX_PACKED_BYTES
            for layers in _groups(model):
                dtype = _packed_dtype(layers[0])
                num_bytes = dtype.itemsize * sum(layer.weight.numel() for layer in layers)
                if num_bytes <= budget:
                    budget -= num_bytes
                    for layer, forward in zip(layers, _packed_forwards(layers, dtype, rows), strict=True):
                        layer.forward = forward  # type: ignore[method-assign, assignment]
                        packed.append(layer)
        yield
    finally:
        for layer in packed:
            del layer.forward


def packed_bytes(model: nn.Module, *, steps: int) -> int:
    """Bytes of the packed copies of linear layers if the model is on a CPU; `model` may be on any device."""
    if steps < _MIN_STEPS:
        return 0
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    return min(_MAX_PACKED_BYTES, sum(_packed_dtype(layer).itemsize * layer.weight.numel() for layer in layers))


def _groups(model: nn.Module) -> Iterator[Sequence[nn.Linear]]:
    """The layers that can be packed; those that become one product together."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in _SAME_INPUT:
            layers = [layer for name in names if _can_be_packed(layer := getattr(module, name, None)) and layer not in grouped]
            kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
            if len(layers) == len(names) and len(kinds) == 1:
                grouped.update(layers)
                yield layers
    yield from ([module] for module in model.modules() if _can_be_packed(module) and module not in grouped)


def _packed_forwards(
    layers: Sequence[nn.Linear], dtype: torch.dtype, rows: int
) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
    """A forward for each layer, which share one packed weight."""
    weights = [layer.weight.detach().to(dtype) for layer in layers]
    biases = [layer.bias.detach().to(dtype) for layer in layers if layer.bias is not None]
    product = _PackedProduct(
        torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None, rows
    )
    if len(layers) == 1:
        return [product]
    shared = _SharedProduct(product, [layer.out_features for layer in layers])
    return [shared.part(index) for index in range(len(layers))]


def padded_rows(rows: int) -> int:
    """`rows` up to 8, then rounded up to 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on: at most a quarter more.

    oneDNN compiles a program for each shape of a product and keeps a thousand of them, with 0.3 to 0.7 MB each. Without
    rounding, the memory of a process that samples batches of all sizes grows by hundreds of MB.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


class _PackedProduct:
    """The linear map of a packed weight [H', H] and its bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        self._weight, self._bias = reorder_linear_weight(weight, rows), bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        flat = input.to(self._weight.dtype).reshape(-1, input.shape[-1])
        rows = len(flat)
        if (padded := padded_rows(rows)) > rows:
            flat = nn.functional.pad(flat, (0, 0, 0, padded - rows))
        output: torch.Tensor = linear_pointwise(flat, self._weight, self._bias, "none", [], "")
        return output[:rows].view(*input.shape[:-1], -1).to(input.dtype)


class _SharedProduct:
    """One product for several layers, computed by the first that is called with an input; the others take their part of it."""

    def __init__(self, product: _PackedProduct, sizes: Sequence[int]) -> None:
        self._product, self._sizes = product, list(sizes)
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = [None] * len(sizes)

    def part(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward of one layer."""

        def forward(input: torch.Tensor) -> torch.Tensor:
            found = self._parts[index] if self._input is input else None
            if found is None:
                self._input = input
                self._parts = list(self._product(input).split(self._sizes, dim=-1))
                found = self._parts[index]
                assert found is not None
            self._parts[index] = None  # each layer reads an input once; a second call computes it again
            if not any(part is not None for part in self._parts):
                self._input = None
            return found

        return forward


def _packed_dtype(module: nn.Linear) -> torch.dtype:
    """The weight's own type; float32 for bfloat16 on a CPU without its instructions."""
    is_native = module.weight.dtype == torch.float32 or has_bfloat16_products()
    return module.weight.dtype if is_native else torch.float32


def _can_be_packed(module: object) -> TypeGuard[nn.Linear]:
    if linear_pointwise is None or reorder_linear_weight is None:
        return False
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module.weight.device.type != "cpu":
        return False
    if type(module.weight) is not nn.Parameter or module._forward_pre_hooks:
        return False
    if not all(isinstance(hook, AddedAdapter) for hook in module._forward_hooks.values()):
        return False
    return module.weight.dtype in (torch.float32, torch.bfloat16)
