"""Gradients of bfloat16 embeddings and layer norms on a CPU, summed in float32.

torch sums what the tokens of a microbatch add to these gradients in the data type of the weight, one after the other. A
bfloat16 sum has 8 bits, so it ignores what is less than 1/512 of it, and the more tokens there are, the less of their gradient
is left: of a token that occurs 1000 times, a third (torch 2.13; `findings/torch_bfloat16_sums.sh`). Gradients of matrices,
biases and RMS norms are summed in float32 and rounded once, as are all of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def sum_gradients_in_float32(modules: Iterable[nn.Module]) -> None:
    """Round the gradients of these modules' embeddings and layer norms once, after they were summed over a microbatch.

    Only those of bfloat16 weights on a CPU change; the forward pass does not. A second call changes nothing.

    Args:
        modules: modules whose `forward` calls `torch.nn.functional.embedding` or `layer_norm`; not compiled.
    """
    for module in modules:
        if "forward" not in vars(module):
            module.forward = partial(_replacing, module.forward)


def _replacing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Replaced():
        return forward(*args, **kwargs)


class _Replaced(TorchFunctionMode):
    """Replaces calls inside of a forward pass: modules such as the scaled embeddings of Gemma 3 do more than the call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _loses_gradients(weight: torch.Tensor | None) -> bool:
    is_trained = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    return is_trained and weight is not None and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if not _loses_gradients(weight):
        return functional.embedding(ids, weight, padding_idx, *args, **kwargs)
    return _Rows.apply(weight, ids, padding_idx)  # type: ignore[no-untyped-call]


def _layer_norm(
    inputs: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    shape = list(normalized_shape)
    if len(shape) != 1 or weight is None or not _loses_gradients(weight):
        return functional.layer_norm(inputs, shape, weight, bias, eps)
    outputs = functional.layer_norm(inputs, shape, weight.detach(), None if bias is None else bias.detach(), eps)
    return _NormSums.apply(outputs, inputs, weight, bias, eps)  # type: ignore[no-untyped-call]


_REPLACEMENTS: Final[dict[Any, Callable[..., Any]]] = {
    functional.embedding: _embedding,
    functional.layer_norm: _layer_norm,
}


class _Rows(torch.autograd.Function):
    """Rows of a weight [V, H] by ids."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.vocab_size, ctx.padding_idx = len(weight), padding_idx
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tokens, rows = ctx.saved_tensors[0].unique(return_inverse=True)
        width = gradient.shape[-1]
        sums = torch.zeros(len(tokens), width).index_add_(0, rows.flatten(), gradient.reshape(-1, width).float())
        if ctx.padding_idx is not None:
            sums[tokens == ctx.padding_idx % ctx.vocab_size] = 0
        whole = gradient.new_zeros(ctx.vocab_size, width)
        whole[tokens] = sums.to(whole.dtype)
        return whole, None, None


class _NormSums(torch.autograd.Function):
    """The outputs [..., H] of a layer norm unchanged; adds the gradients of its weight [H] and bias [H]."""

    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.eps, ctx.has_bias = eps, bias is not None
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        width = gradient.shape[-1]
        rows = gradient.reshape(-1, width).float()
        normalized = functional.layer_norm(inputs.reshape(-1, width).float(), (width,), eps=ctx.eps)
        bias = rows.sum(0).to(gradient.dtype) if ctx.has_bias else None
        return gradient, None, (rows * normalized).sum(0).to(gradient.dtype), bias, None
