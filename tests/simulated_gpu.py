"""A simulated GPU for tests on machines without one: which tensors are on it, what waits for it, and how much memory it has.

Every computation runs on the CPU, by torch's CPU kernels, so results equal those of the CPU bit for bit, with gradients and
optimizers. What is simulated is where a tensor is. A storage is on the GPU if it carries an `_Allocation`, which all views of
the storage share. Within the block of `SimulatedGpu`, as on a real GPU:

- `device`, `is_cuda` and the functions of `torch.cuda` report `cuda:0`;
- an operation on tensors of both devices raises, as does `numpy()` on the GPU;
- each operation for which the host waits is counted, with the line of our code that started it: `item`, `tolist`, comparisons,
  copies, indices that are on the host, and operations whose output shape depends on values;
- a copy with `non_blocking=True` between pinned memory and the GPU does not wait. Until the host waits for something else, its
  destination on the host contains garbage, and its source on the host must not change;
- `torch.cuda.memory_allocated` and its peak are exact, without the fragmentation and the workspaces of a real GPU.

There is one stream. Other threads are not simulated, nor are kernels: an operator that exists only for CPUs raises.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "equal",
    "bincount",
)
"""Operators whose result on the host, or whose output shape, depends on values of the GPU."""
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy", "set_", "set_data", "_foreach_copy_")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_MADE_FROM_DATA = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class _Allocation:
    """Memory of the GPU, freed with its storage."""

    def __init__(self, gpu: SimulatedGpu, num_bytes: int) -> None:
        self._gpu, self._bytes = gpu, 0
        if gpu.allocated + num_bytes > gpu.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
        self._bytes = num_bytes
        gpu.allocated += num_bytes
        gpu.peak = max(gpu.peak, gpu.allocated)

    def __del__(self) -> None:
        self._gpu.allocated -= self._bytes


@dataclass
class _Copy:
    """A copy that the host has not waited for."""

    to_host: bool
    on_host: torch.Tensor
    values: torch.Tensor


@dataclass
class SimulatedGpu:
    """The state of the GPU.

    Attributes:
        waits: number of times that the host waited for the GPU, by operation and line.
        copies: number of copies between host and GPU, by direction ("to cuda" or "to cpu").
        pinned: number of allocations of pinned memory.
        allocated: bytes of all storages on the GPU.
        peak: maximum of `allocated`.
        total: bytes of the GPU.
    """

    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    allocated: int = 0
    peak: int = 0
    total: int = 80 * 2**30
    _pending: list[_Copy] = field(default_factory=list)
    _calls: list[tuple[bool, torch.device | None]] = field(default_factory=list)
    """For each torch function that is running: whether an argument is on the GPU, and the device that it was called with."""

    @contextmanager
    def active(self) -> Iterator[Self]:
        """Simulate the GPU in this thread while the block runs."""
        with ExitStack() as stack:
            for name, value in _cuda_functions(self).items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            # Optimizers ask a real GPU, if torch is built for one, whether it captures a graph.
            stack.enter_context(patch.object(torch.accelerator, "current_accelerator", lambda **_: None))
            for name in ("pin_memory", "record_stream"):  # vLLM's CPU worker replaces them if it was imported in this process
                stack.enter_context(patch.object(torch.Tensor, name, getattr(torch._C.TensorBase, name)))
            stack.enter_context(patch.object(torch.Tensor, "_make_wrapper_subclass", _wrapper_on_host))
            stack.enter_context(_Operators(self))
            stack.enter_context(_Functions(self))
            yield self

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """The waits of the block, once it has ended."""
        before, counted = self.waits.copy(), Counter[str]()
        yield counted
        counted.update(self.waits - before)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return hasattr(_storage(tensor), "allocation")

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the GPU the device of a tensor's storage, if it is not yet."""
        storage = _storage(tensor)
        if storage is not None and not hasattr(storage, "allocation"):
            storage.allocation = _Allocation(self, storage.nbytes())
        return tensor

    def wait(self, operation: str) -> None:
        """Record that the host waits for the GPU: all copies that were started are then complete."""
        self.waits[f"{operation} {_line()}"] += 1
        self.finish_copies()

    def finish_copies(self) -> None:
        """Complete all copies that were started."""
        for copy in self._pending:
            if copy.to_host:
                _plain(copy.on_host.copy_, copy.values)
            elif not _plain(torch.equal, copy.on_host, copy.values):
                raise AssertionError("pinned memory was changed before its copy to the GPU was complete")
        self._pending.clear()

    def start_copy(self, source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
        """Record a copy between host and GPU, whose values are already in `target`."""
        if source.numel() == 0:
            return
        to_host = self.holds(source)
        on_host = target if to_host else source
        self.copies["to cpu" if to_host else "to cuda"] += 1
        if not (non_blocking and _is_pinned(on_host)):
            self.wait("copy to cpu" if to_host else "copy to cuda")
            return
        self._pending.append(_Copy(to_host, on_host, _plain(on_host.detach().clone)))
        if to_host:
            _plain(on_host.detach().fill_, float("nan") if on_host.is_floating_point() else 77)


class _Functions(TorchFunctionMode):
    """Handles what tensors report, copies between devices, and arguments that name the GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._handlers: Mapping[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda tensor: CUDA if gpu.holds(tensor) else _real_device(tensor),
            torch.Tensor.is_cuda.__get__: gpu.holds,
            torch.Tensor.is_cpu.__get__: lambda tensor: not gpu.holds(tensor) and _real_device(tensor).type == "cpu",
            torch.Tensor.get_device: lambda tensor: 0 if gpu.holds(tensor) else -1,
            torch.Tensor.is_pinned: lambda tensor, *_: _is_pinned(tensor),
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda tensor, **_: self._to(tensor, CPU),
            torch.Tensor.cuda: lambda tensor, *_, **options: self._to(tensor, CUDA, **options),
            torch.Tensor.tolist: self._tolist,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._numpy,
        }

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        try:
            handler = self._handlers.get(func)
        except TypeError:  # a function without a hash
            handler = None
        if handler is not None:
            return handler(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        on_gpu = any(map(self._gpu.holds, tensors))
        if on_gpu and any(word in str(getattr(func, "__name__", func)) for word in ("for_cpu", "mkldnn", "fbgemm")):
            raise NotImplementedError(f"{func} exists only for CPUs")
        device = _device_argument(kwargs)
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
        pinned = kwargs.pop("pin_memory", False)
        self._gpu._calls.append((on_gpu, device))
        try:
            result = func(*args, **kwargs)
        finally:
            self._gpu._calls.pop()
        if func in _MADE_FROM_DATA and (device == CUDA or (device is None and func is torch.Tensor.new_tensor and on_gpu)):
            if result.numel() and (not on_gpu or func is torch.Tensor.new_tensor):
                self._gpu.copies["to cuda"] += 1
                self._gpu.wait("copy to cuda")
            self._gpu.put(result)
        return self._mark_pinned(result) if pinned else result

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            other, *rest = args
            args = (CUDA if self._gpu.holds(other) else _real_device(other), other.dtype, *rest)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if memory_format is None else {"memory_format": memory_format}
        here = self._gpu.holds(tensor)
        there = here if device is None else device.type == "cuda"
        if here == there or (device is not None and device.type == "meta") or _real_device(tensor).type == "meta":
            target = _real_device(tensor) if device is None or here == there else device
            self._gpu._calls.append((here, None))
            try:
                moved = tensor.to(target, dtype or tensor.dtype, non_blocking, copy, **options)
            finally:
                self._gpu._calls.pop()
            return self._gpu.put(moved) if there and moved is not tensor else moved
        self._gpu._calls.append((here, CUDA if there else CPU))
        try:
            moved = tensor.to(dtype or tensor.dtype, copy=True, **options)
        finally:
            self._gpu._calls.pop()
        if there:
            self._gpu.put(moved)
        elif non_blocking:
            self._mark_pinned(moved)
        self._gpu.start_copy(tensor, moved, non_blocking=non_blocking)
        return moved

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if self._gpu.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return tensor if _is_pinned(tensor) else self._mark_pinned(tensor.clone())

    def _mark_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        _storage(tensor).pinned = True
        self._gpu.pinned += 1
        return tensor

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if self._gpu.holds(tensor):
            self._gpu.copies["to cpu"] += 1
            self._gpu.wait("tolist")
        return tensor.tolist()

    def _numpy(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._gpu.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first.")
        return tensor.__array__(*args) if args else tensor.numpy(**kwargs)


class _Operators(TorchDispatchMode):
    """Decides where outputs are, and finds mixed devices and waits; also runs within gradients and torch's own functions."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        tensors = list(_tensors((args, kwargs)))
        on_gpu = [tensor for tensor in tensors if self._gpu.holds(tensor)]
        on_host = [tensor for tensor in tensors if not self._gpu.holds(tensor) and tensor.dim() > 0]
        if on_gpu:
            self._check(name, args, on_host)
        if (device := _device_argument(kwargs)) is not None and device.type == "cuda":
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        inherits, wanted = self._gpu._calls[-1] if self._gpu._calls else (False, None)
        makes = not tensors or name in _NEW or name.endswith("_like") or name == "_to_copy"
        there = wanted.type == "cuda" if makes and wanted is not None else bool(on_gpu) or (not tensors and inherits)
        if name == "copy_" or name == "set_data":
            there = self._gpu.holds(args[0])
        if there:
            known = {id(_storage(tensor)) for tensor in tensors}
            for output in _tensors(result):
                if id(_storage(output)) not in known:
                    self._gpu.put(output)
        if name == "copy_" and self._gpu.holds(args[0]) != self._gpu.holds(args[1]):
            non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            self._gpu.start_copy(args[1], args[0], non_blocking=non_blocking)
        return result

    def _check(self, name: str, args: tuple[Any, ...], on_host: list[torch.Tensor]) -> None:
        if name in _WAITS or (name == "repeat_interleave" and len(args) == 1):
            self._gpu.wait(name)
        elif name in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(not self._gpu.holds(index) for index in indices):
                self._gpu.copies["to cuda"] += 1
                self._gpu.wait("index on the host")
            elif any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self._gpu.wait("index by a mask")
            on_host = [tensor for tensor in on_host if all(tensor is not index for index in indices)]
        if on_host and name not in _COPIES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name} at "
                f"{_line()})"
            )


def _cuda_functions(gpu: SimulatedGpu) -> dict[str, Any]:
    """The functions of `torch.cuda` that this project, Transformers and torch itself call."""

    def synchronize(*_: Any) -> None:
        gpu.wait("synchronize")

    def reset_peak(*_: Any) -> None:
        gpu.peak = gpu.allocated

    event = SimpleNamespace(record=lambda *_: None, synchronize=synchronize, wait=lambda *_: None, query=lambda: True)
    stream = SimpleNamespace(synchronize=synchronize, wait_stream=lambda *_: None, wait_event=lambda *_: None)
    properties = SimpleNamespace(uuid="GPU-simulated", name="simulated", total_memory=gpu.total, major=8, minor=0)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "current_stream": lambda *_: stream,
        "Stream": lambda *_, **__: stream,
        "stream": lambda _: nullcontext(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "Event": lambda *_, **__: event,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: gpu.allocated,
        "memory_reserved": lambda *_: gpu.allocated,
        "max_memory_allocated": lambda *_: gpu.peak,
        "max_memory_reserved": lambda *_: gpu.peak,
        "reset_peak_memory_stats": reset_peak,
        "mem_get_info": lambda *_: (gpu.total - gpu.allocated, gpu.total),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda _: None,
    }


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested arguments; faster than torch's own, which takes most of a test's time."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _device_argument(kwargs: Mapping[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device)


def _wrapper_on_host(*args: Any, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    """A tensor that consists of others, made on the host; the device that it reports is that of its parts."""
    return torch._C.TensorBase._make_wrapper_subclass(*args, device=CPU, **options)


def _storage(tensor: torch.Tensor) -> Any:
    if is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor without memory, such as one within vmap
        return None


def _is_pinned(tensor: torch.Tensor) -> bool:
    return hasattr(_storage(tensor), "pinned")


def _real_device(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return tensor.device


def _plain(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of torch outside of the simulation, and without gradients."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        return function(*args)


def _line() -> str:
    """The innermost line of our own code, or else of the caller."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/src/rl_" in path:
            return f"{path.rpartition('/src/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
