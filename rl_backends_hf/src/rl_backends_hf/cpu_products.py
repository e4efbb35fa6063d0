"""Matrix products of bfloat16 tensors on CPUs without instructions for them.

There, torch emulates a bfloat16 product at a fraction of the speed of float32. `float32_products` converts its inputs to
float32, multiplies, and rounds the result to bfloat16 once. CPUs with these instructions add products in float32, too, so
only the order of sums can differ. Weights, activations and gradients stay bfloat16.
"""

from __future__ import annotations

import logging
import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 matrices without emulation: AVX512-BF16 or AMX, or BF16 of ARM."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_in_float32(chosen: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a policy computes products of bfloat16 matrices in float32, which is logged if it is not configured.

    Args:
        chosen: `policy.hf_cfg.cpu_products`.
        dtype: of the model.
        device: of the model.

    Raises:
        UserError: a choice that has no effect.
    """
    is_on_cpu = dtype == torch.bfloat16 and device.type == "cpu"
    if chosen != "auto" and not is_on_cpu:
        raise UserError(
            f"`cpu_products: {chosen}` has no effect with weights of {dtype} on {device}. Remove it.",
            key="policy.hf_cfg.cpu_products",
        )
    if chosen != "auto" or not is_on_cpu or has_bfloat16_products():
        return chosen == "float32"
    _log.info(
        "This CPU (%s) has no bfloat16 instructions, so the policy multiplies in float32 and rounds the results to bfloat16 "
        "(`policy.hf_cfg.cpu_products`). Weights and transfers are bfloat16.",
        torch.backends.cpu.get_cpu_capability(),
    )
    return True


def float32_products(enabled: bool) -> AbstractContextManager[Any]:
    """Compute products of bfloat16 matrices on the CPU in float32 while the block runs in this thread, if `enabled`."""
    return _Float32Products() if enabled else nullcontext()  # type: ignore[no-untyped-call]


class _Float32Products(TorchDispatchMode):
    """Replaces each product with bfloat16 inputs, including those of the backward pass, which CPUs run in the same thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        function = _FUNCTIONS.get(func)
        if function is None or args[0].dtype != torch.bfloat16 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        target = args[0] if func in _IN_PLACE else kwargs.pop("out", None)
        exact = function(*(each.float() if isinstance(each, torch.Tensor) else each for each in args), **kwargs)
        return exact.to(torch.bfloat16) if target is None else target.copy_(exact)
