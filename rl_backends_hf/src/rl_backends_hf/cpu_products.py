"""How a policy on a CPU multiplies matrices, where torch's own products are slow, and sums gradients, where it rounds them.

- **bfloat16 without its instructions**: torch emulates such a product at a fraction of the speed of float32. Here, inputs are
  converted to float32, multiplied, and the result is rounded to bfloat16 once. CPUs with these instructions add products in
  float32, too. Weights, activations and gradients stay bfloat16.
- **float32 on an AMD CPU with AVX-512**: MKL, torch's library, uses only AVX2 there. Large products are computed by oneDNN,
  which is part of torch and about twice as fast.

In both, only the order of sums can differ. Gradients of bfloat16 embeddings and layer norms are summed in float32.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rl_backends_hf.torch_internals import TorchDispatchMode, has_bfloat16_products, linear_pointwise
from rl_core.errors import UserError

_log = logging.getLogger(__name__)

_aten = torch.ops.aten
_FUNCTIONS: Final = {
    _aten.mm.default: _aten.mm.default,
    _aten.mm.out: _aten.mm.default,
    _aten.addmm.default: _aten.addmm.default,
    _aten.addmm_.default: _aten.addmm.default,
    _aten.bmm.default: _aten.bmm.default,
    _aten.bmm.out: _aten.bmm.default,
    _aten.baddbmm.default: _aten.baddbmm.default,
    _aten.baddbmm_.default: _aten.baddbmm.default,
}
"""Products that autograd and the models call, and the function that returns the result of each."""
_IN_PLACE: Final = (_aten.addmm_.default, _aten.baddbmm_.default)
_MIN_PRODUCTS: Final = 2**26
"""Multiplications from which a product is given to oneDNN, which compiles a program of about 1 ms for each new shape."""
_MIN_WEIGHTS: Final = 2**17
"""Weights of a matrix whose product with 512 tokens is that large. A model without one would only pay for the replacement,
which takes 4 us for each operation of torch."""
_BLOCK: Final = 2**20
"""Numbers that are added to a matrix at one time; new memory for a large result takes longer than computing it."""
_CPU_INFO: Final = Path("/proc/cpuinfo")
_MOST_PROGRAMS: Final = "128"
"""Number of shapes of which oneDNN keeps the programs, with about 0.6 MB each. Its default is 1024; one microbatch has 20."""


@dataclass(frozen=True, kw_only=True)
class CpuProducts:
    """Which products are replaced.

    Attributes:
        in_float32: those of bfloat16 matrices, by products in float32.
        by_onednn: large ones of float32 matrices, by oneDNN's.
    """

    in_float32: bool = False
    by_onednn: bool = False

    @classmethod
    def of(cls, chosen: str, dtype: torch.dtype, device: torch.device, *, model: nn.Module | None = None) -> CpuProducts:
        """What suits a policy on this CPU, decided from the CPU's type; logged if bfloat16 is replaced unasked.

        Args:
            chosen: `policy.hf_cfg.cpu_products`.
            dtype: of the model.
            device: of the model.
            model: the model; None if only products of bfloat16 matrices may be replaced.

        Raises:
            UserError: a choice that has no effect.
        """
        is_bfloat16 = dtype == torch.bfloat16 and device.type == "cpu"
        if chosen != "auto" and not is_bfloat16:
            raise UserError(
                f"`cpu_products: {chosen}` has no effect with weights of {dtype} on {device}. Remove it.",
                key="policy.hf_cfg.cpu_products",
            )
        if is_bfloat16 and chosen == "auto" and not has_bfloat16_products():
            _log.info(
                "This CPU (%s) has no bfloat16 instructions, so the policy multiplies in float32 and rounds the results to "
                "bfloat16 (`policy.hf_cfg.cpu_products`). Weights and transfers are bfloat16.",
                torch.backends.cpu.get_cpu_capability(),
            )
            chosen = "float32"
        in_float32 = chosen == "float32"
        is_float32 = in_float32 or (dtype == torch.float32 and device.type == "cpu")
        largest = 0 if model is None else max(each.numel() for each in model.parameters())
        by_onednn = is_float32 and largest >= _MIN_WEIGHTS and _is_onednn_faster()
        if by_onednn:
            _limit_programs()
        return cls(in_float32=in_float32, by_onednn=by_onednn)

    def __call__(self) -> AbstractContextManager[Any]:
        """Replace the products of this thread while the block runs, including those of a backward pass."""
        return _Replaced(self) if self.in_float32 or self.by_onednn else nullcontext()


def _is_onednn_faster() -> bool:
    """Whether torch multiplies float32 matrices with MKL on an AMD CPU with AVX-512, and has oneDNN's product."""
    mkldnn = torch.backends.mkldnn
    if not (torch.backends.mkl.is_available() and mkldnn.is_available() and mkldnn.enabled):
        return False
    is_amd = "AuthenticAMD" in (_CPU_INFO.read_text() if _CPU_INFO.exists() else platform.processor())
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_amd and has_avx512 and linear_pointwise is not None


def _limit_programs() -> None:
    """Limit both caches of programs, which read this at the first product, unless the environment of the process does."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, _MOST_PROGRAMS)


class _Replaced(TorchDispatchMode):
    """Replaces products of CPU matrices, also those of the backward pass, which CPUs run in the same thread."""

    def __init__(self, products: CpuProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        function = _FUNCTIONS.get(func)
        if function is None or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        dtype = args[0].dtype
        if dtype == torch.bfloat16 and self._products.in_float32:
            target = args[0] if func in _IN_PLACE else kwargs.pop("out", None)
            exact = self._exact(function, [each.float() if isinstance(each, torch.Tensor) else each for each in args], kwargs)
            return exact.to(dtype) if target is None else target.copy_(exact)
        return self._exact(func, args, kwargs)

    def _exact(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        multiply: Any = _ONEDNN.get(func) if self._products.by_onednn and args[0].dtype == torch.float32 else None
        if multiply is None or kwargs.keys() - {"out"} or not _is_large(*args[-2:]):
            return func(*args, **kwargs)
        return multiply(*args, **kwargs)


def _is_large(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape[0] * left.shape[1] * right.shape[1] >= _MIN_PRODUCTS


def _mm(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = linear_pointwise(left, right.t(), bias, "none", [], "")
    return product


def _addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _mm(left, right, added) if added.ndim == 1 else _mm(left, right).add_(added)


def _addmm_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    step = max(1, _BLOCK // total.shape[1])
    for start in range(0, len(total), step):
        total[start : start + step].add_(_mm(left[start : start + step], right))
    return total


def _mm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_mm(left, right))


_ONEDNN: Final = {
    _aten.mm.default: _mm,
    _aten.mm.out: _mm_out,
    _aten.addmm.default: _addmm,
    _aten.addmm_.default: _addmm_,
}
"""Products of float32 matrices by oneDNN."""


def sum_gradients_in_float32(modules: Iterable[nn.Module]) -> None:
    """Round the gradients of these modules' embeddings and layer norms once, after they were summed over a microbatch.

    torch sums what the tokens of a microbatch add to these gradients in the data type of the weight, one after the other. A
    bfloat16 sum has 8 bits, so it ignores what is less than 1/512 of it: a sum of ones ends at 256 (torch 2.13;
    `findings/torch_bfloat16_sums.sh`). Gradients of matrices, biases and RMS norms are summed in float32 and rounded once, as
    these are here.

    Only those of bfloat16 weights on a CPU change; the forward pass does not. A second call changes nothing.

    Args:
        modules: modules whose `forward` calls `torch.nn.functional.embedding` or `layer_norm`; not compiled.
    """
    for module in modules:
        if "forward" not in vars(module):
            module.forward = partial(_with_sums, module.forward)


def _with_sums(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _SumsInFloat32():
        return forward(*args, **kwargs)


class _SumsInFloat32(TorchFunctionMode):
    """Replaces calls inside of a forward pass: modules such as the scaled embeddings of Gemma 3 do more than the call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _SUMMED.get(func, func)(*args, **(kwargs or {}))


def _loses_gradients(weight: torch.Tensor | None) -> bool:
    if weight is None or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


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


_SUMMED: Final[dict[Any, Callable[..., Any]]] = {
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
