"""Packs the weights of linear layers for oneDNN while a model samples on a CPU.

Decoding multiplies a few rows by every weight once per token. torch's plain product packs the weight again each time, which in
float32 costs more than the product itself; here it is packed once per call and freed afterwards. Results are equal up to the
order of float32 sums, in which bfloat16 products are summed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeGuard

import torch
from torch import nn

_MIN_STEPS: Final = 12
"""Minimum number of decoding steps for packing, which takes about as long as two to four unpacked steps."""
_MAX_PACKED_BYTES: Final = 4 * 2**30
"""Maximum size of packed copies; further layers stay unpacked, so that a large model does not need twice its memory."""


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
            for module in model.modules():
                if not _can_be_packed(module):
                    continue
                dtype = _packed_dtype(module)
                num_bytes = dtype.itemsize * module.weight.numel()
                if num_bytes <= budget:
                    budget -= num_bytes
                    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach().to(dtype), rows)
                    bias = None if module.bias is None else module.bias.detach().to(dtype)
                    module.forward = partial(_packed_forward, weight, bias)  # type: ignore[method-assign]
                    packed.append(module)
        yield
    finally:
        for module in packed:
            del module.forward


def _packed_forward(weight: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input.to(weight.dtype), weight, bias, "none", [], "")
    return output.to(input.dtype)


def _packed_dtype(module: nn.Linear) -> torch.dtype:
    """The weight's own type; float32 for bfloat16 on a CPU without its instructions."""
    is_native = module.weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return module.weight.dtype if is_native else torch.float32


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module.weight.device.type != "cpu":
        return False
    if type(module.weight) is not nn.Parameter or module._forward_hooks or module._forward_pre_hooks:
        return False
    return module.weight.dtype in (torch.float32, torch.bfloat16)
