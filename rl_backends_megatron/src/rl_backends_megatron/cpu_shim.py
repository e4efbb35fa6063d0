"""Lets the unmodified wheel of Megatron-Core run without CUDA; does nothing if CUDA is available.

Megatron-Core 0.16.1 uses the device "cuda" by name in about fifty places. Inside `with cpu_shim():`, it means the CPU. Two
mechanisms are used: a `TorchFunctionMode` replaces device arguments of torch calls (1.4 us per call), and four module
attributes that no argument reaches are replaced. All of them are private to this version, so the version is checked, and
`check_megatron` asserts at start that everything that is changed exists: here, and in the modules `gpt` (end of a forward
pass), `optimizer` (entries of a weight that a rank updates), `optimizer_state` and `training_state` (reading and writing
checkpoints). Nothing else of Megatron is changed.

The mode applies to one thread: enter it in the thread that calls Megatron, around building models and optimizers, forward and
backward passes, optimizer steps and distributed checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from rl_core.errors import UserError

MEGATRON_VERSION: Final = "0.16.1"
_CPU = torch.device("cpu")
_CUDA_METHOD, _TYPE_METHOD = torch.Tensor.cuda, torch.Tensor.type
_OPTIMIZERS = "/megatron/core/optimizer/"
_REQUIRED_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "megatron.core.models.gpt.gpt_model": ("GPTModel._postprocess",),
    "megatron.core.dist_checkpointing.strategies.filesystem_async": ("_results_queue",),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer.get_parameter_state_dp_zero",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "DistributedOptimizer._get_model_param_range_map",
    ),
    "megatron.core.tensor_parallel.random": ("_get_cuda_rng_state", "_set_cuda_rng_state"),
    "megatron.core.transformer.moe.moe_utils": ("RouterGatingLinearFunction",),
    "megatron.core.transformer.moe.token_dispatcher": (
        "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    ),
}


def check_megatron() -> None:
    """Check that the installed Megatron-Core is the supported version.

    Raises:
        UserError: it is another version, or lacks names that are changed here.
    """
    installed = version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise UserError(
            f"megatron-core {installed} is installed, but this backend requires {MEGATRON_VERSION}, because it uses private "
            f"names. Install it with `pip install megatron-core=={MEGATRON_VERSION}`."
        )
    for module_name, names in _REQUIRED_NAMES.items():
        module = importlib.import_module(module_name)
        for name in names:
            owner: Any = module
            for attribute in name.split("."):
                if not hasattr(owner, attribute):
                    raise UserError(
                        f"{module_name} has no {name}, although megatron-core reports version {installed}: the installation is "
                        f"modified or incomplete. Reinstall it with `pip install --force-reinstall --no-deps "
                        f"megatron-core=={installed}`."
                    )
                owner = getattr(owner, attribute)


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
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


@cache
def _replace_attributes() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # Recomputation saves the device's random state, which is not needed without dropout.
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    # With any value except None, no CUDA stream is created.
    dispatcher.cuda_dtoh_stream = False
    dispatcher._maybe_dtoh_and_synchronize = _splits_on_host


def _splits_on_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The dispatcher's work at its copy point without a stream: split sizes as arrays."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.numpy())
    return tokens_per_expert
