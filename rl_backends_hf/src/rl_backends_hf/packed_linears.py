"""Linear layers of a model on a CPU, their weights packed for oneDNN while it samples; knows nothing of tokens.

Decoding multiplies a few rows by every weight once a token. Torch's plain float32 product packs the weight anew each
time, which costs more than the product itself; here it is packed once a call and freed after it. The product is the same
up to the order of float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeGuard

import torch
from torch import nn

_MIN_STEPS: Final = 12
"""Tokens of a call from which the packing is paid back: it takes about as long as two to four plain steps."""
_MAX_PACKED_BYTES: Final = 4 * 2**30
"""Of packed copies; layers beyond it are left alone, so that a large model does not need its memory twice."""


@contextmanager
def packed_linears(model: nn.Module, *, rows: int, steps: int) -> Iterator[None]:
    """Run the linear layers of `model` from packed copies; they are as before afterwards.

    A bfloat16 model on a CPU without bfloat16 instructions is computed in float32 and rounded once a layer, which is what
    its emulated kernels do at a tenth of the speed.

    Args:
        model: any module; layers on other devices, of other types, or with a forward of their own are left alone.
        rows: rows of the products to come.
        steps: about how many there will be.
    """
    packed: list[nn.Linear] = []
    try:
        if steps >= _MIN_STEPS and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
            budget = _MAX_PACKED_BYTES
            for module in model.modules():
                if _can_be_packed(module) and 4 * module.weight.numel() <= budget:
                    budget -= 4 * module.weight.numel()
                    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach().float(), rows)
                    bias = None if module.bias is None else module.bias.detach().float()
                    module.forward = partial(_packed_forward, weight, bias)  # type: ignore[method-assign]
                    packed.append(module)
        yield
    finally:
        for module in packed:
            del module.forward


def _packed_forward(weight: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input.float(), weight, bias, "none", [], "")
    return output.to(input.dtype)


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module.weight.device.type != "cpu":
        return False
    if type(module.weight) is not nn.Parameter or module._forward_hooks or module._forward_pre_hooks:
        return False
    emulated = module.weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return module.weight.dtype == torch.float32 or emulated
