"""What this backend uses of torch beyond its public interface; the only module here with such names.

docs/compatibility.md lists them with the releases that have them and the tests. A release without an operator is slower, with
one warning, and not wrong: the functions that ask whether it is None then use torch's public ones.
"""

from __future__ import annotations

import logging
import platform
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]

_log = logging.getLogger(__name__)


def _operator(library: str, name: str) -> Any:
    found = getattr(getattr(torch.ops, library), name, None)
    if found is None:
        _log.warning("torch %s has no %s.%s, so this backend is slower.", torch.__version__, library, name)
    return found


flash_attention = _operator("aten", "_scaled_dot_product_flash_attention_for_cpu")
"""SDPA on CPUs that also returns the log-sum-exp of the scores, with which the outputs for two parts of a row are merged."""
flash_attention_backward = _operator("aten", "_scaled_dot_product_flash_attention_for_cpu_backward")
linear_pointwise = _operator("mkldnn", "_linear_pointwise")
"""oneDNN's linear layer, also with a weight from `reorder_linear_weight`."""
reorder_linear_weight = _operator("mkldnn", "_reorder_linear_weight")


def varlen_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator of `torch.nn.attention.varlen.varlen_attn`, with the log-sum-exp; not run on this hardware."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn(*arguments)
    return result


def varlen_attention_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value of `varlen_attention`."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(*arguments)
    return result


def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 matrices without emulation: AVX512-BF16 or AMX, or BF16 of ARM."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        has = torch.cpu.get_capabilities()
        return bool(has.get("avx512_bf16") or has.get("amx_tile"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def without_data() -> Any:
    """A mode in which tensors have no data, with the attribute `computes`.

    While `computes` is true, what depends only on tensors with data is computed, such as the windows of a picture from its
    size, and a comparison of data that do not exist is true. A mask without data selects all.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class WithoutData(FakeTensorMode):
        computes = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if self.computes and not any(isinstance(each, FakeTensor) for each in tensors):
                return func(*args, **(kwargs or {}))
            if self.computes and torch.Tag.data_dependent_output in func.tags and args[0].dtype == torch.bool:
                return True
            if func.__name__.startswith("_grouped_mm") and args[0].ndim == 2:
                # torch computes it for any data type, but knows the shape of the result for bfloat16 only.
                left, right = args[:2]
                groups = [len(args[2])] if right.ndim == 2 else []
                return left.new_empty(*groups, len(left), right.shape[-1])
            if func is torch.ops.aten.index.Tensor:
                [first, *others] = args[1]
                masks = isinstance(first, FakeTensor) and first.dtype == torch.bool
                if masks and all(each is None for each in others):
                    return args[0].flatten(0, first.ndim - 1).clone()
            return super().__torch_dispatch__(func, types, args, kwargs)

    return WithoutData(allow_non_fake_inputs=True)
