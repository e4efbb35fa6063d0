"""Lets the unmodified wheel of Megatron-Core run without CUDA; does nothing if CUDA is available.

Megatron-Core 0.16.1 uses the device "cuda" by name in about fifty places. Inside `with cpu_shim():`, it means the CPU. Two
mechanisms are used: a `TorchFunctionMode` replaces device arguments of torch calls (1.4 us per call), and four module
attributes that no argument reaches are replaced; `megatron_internals` names them, and checks at start that they exist.

The mode applies to one thread: enter it in the thread that calls Megatron, around building models and optimizers, forward and
backward passes, optimizer steps and distributed checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_backends_megatron import megatron_internals

_CPU = torch.device("cpu")
_CUDA_METHOD, _TYPE_METHOD = torch.Tensor.cuda, torch.Tensor.type
_OPTIMIZERS = "/megatron/core/optimizer/"


@contextmanager
def cpu_shim() -> Iterator[None]:
    """Make "cuda" mean the CPU while the block runs; does nothing if torch finds a CUDA device."""
    _define_missing_name()
    if torch.cuda.is_available():
        yield
        return
    _replace_attributes()
    saved = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _CudaMeansCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = saved


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every torch call of a forward pass comes through here; nearly all need no change.
        if kwargs:
            kwargs = _on_cpu(kwargs)
        if func is _CUDA_METHOD:
            return args[0]
        result = func(*args, **(kwargs or {}))
        # Optimizers sort parameters by the name of their type, `torch.cuda.FloatTensor`.
        if func is _TYPE_METHOD and isinstance(result, str) and _OPTIMIZERS in sys._getframe(1).f_code.co_filename:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = dict(kwargs)
    if _is_cuda(changed.get("device")):
        changed["device"] = _CPU
    if changed.get("pin_memory"):
        changed["pin_memory"] = False
    return changed


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


@cache
def _define_missing_name() -> None:
    # Without Transformer Engine, also on GPUs, the router of 0.16.1 uses this name although it is undefined.
    utils = importlib.import_module(megatron_internals.ROUTER_GATE.module)
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


@cache
def _replace_attributes() -> None:
    # Recomputation saves the device's random state, which is not needed without dropout.
    megatron_internals.GET_RANDOM_STATE.replace(lambda *args, **kwargs: None)
    megatron_internals.SET_RANDOM_STATE.replace(lambda *args, **kwargs: None)
    # With any value except None, no CUDA stream is created.
    megatron_internals.COPY_STREAM.replace(False)
    megatron_internals.COPY_TO_HOST.replace(_splits_on_host)


def _splits_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The dispatcher's work at its copy point without a stream: split sizes as arrays."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.numpy())
    return tokens_per_expert
