"""Bytes on one GPU that another process of the node can map: buffers that take turns, and their handles; knows no weights.

What is shared is a buffer, never a model's own tensor. Torch counts what receivers hold of a shared storage: a handle that
nobody opens (a policy rank on a GPU without an engine) would keep its memory for good, and a parameter that is shared in every
refit would be wrapped once more by each. The copy into the buffer costs a thousandth of a second a gigabyte.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from rl_core.errors import WeightSyncError

_here: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
"""The buffers of this process, by their name in handles: CUDA refuses to map memory into the process that it is of."""


class GpuBuffer:
    """Bytes on this process's GPU, shared once for as long as they live."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        """Take the memory.

        Args:
            size: in bytes.
            device: the GPU.
        """
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        """[size] uint8."""
        self._name = uuid.uuid4().hex
        self._shared: tuple[Any, tuple[Any, ...]] | None = None
        _here[self._name] = self.bytes

    def handle(self) -> dict[str, Any]:
        """What `open_buffer` takes, once all that was written before has reached the GPU's memory."""
        from torch.multiprocessing.reductions import reduce_tensor

        if self._shared is None:
            self._shared = reduce_tensor(self.bytes)
        torch.cuda.current_stream(self.bytes.device).synchronize()
        rebuild, arguments = self._shared
        return {"name": self._name, "rebuild": rebuild, "arguments": arguments}

    def close(self) -> None:
        """Give the memory back; the receivers have let go of it. Calling it twice is fine."""
        shared, self._shared = self._shared, None
        if shared is not None:
            # Torch waits for one receiver of each sharing, and there may have been none; those that came have counted too.
            given = _bound(*shared)
            self.bytes.untyped_storage()._release_ipc_counter(
                given["ref_counter_handle"], given["ref_counter_offset"], device=self.bytes.device
            )
        self.bytes = torch.empty(0, dtype=torch.uint8)


class GpuBufferPair:
    """Two buffers that take turns, so that one bucket is written while the one before is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[GpuBuffer | None] = [None, None]
        self._turn = 0

    def next(self, size: int) -> GpuBuffer:
        """The buffer whose turn it is, with room for `size` bytes; a bucket in it since the turn before is lost."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.bytes.numel() < size:
            if buffer is not None:
                buffer.close()
            self._buffers[self._turn] = buffer = GpuBuffer(max(size, 1), device=self._device)
        return buffer

    def close(self) -> None:
        """Give both back to the GPU, where the engine beside may need them; calling it twice is fine."""
        closed = [buffer for buffer in self._buffers if buffer is not None]
        self._buffers = [None, None]
        for buffer in closed:
            buffer.close()
        if closed and self._device.type == "cuda":
            torch.cuda.empty_cache()


def device_uuid(device: torch.device) -> str:
    """The GPU's own identity; an index means another GPU in each process that CUDA_VISIBLE_DEVICES differs in."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_buffer(devices: Mapping[str, Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """The sender's buffer, uint8; it is unmapped with the last tensor over it.

    Args:
        devices: GPU uuid to what `GpuBuffer.handle` gave there.
        device: where the receiver computes.

    Raises:
        WeightSyncError: the memory cannot be reached from there.
    """
    if device.type != "cuda":
        raise WeightSyncError("The policy hands over weights on a GPU and this generation worker computes on the CPU.")
    own = device_uuid(device)
    if own not in devices:
        raise WeightSyncError(
            f"This generation worker computes on GPU {own}; the policy has its weights on {', '.join(devices)}. CUDA IPC "
            "needs one GPU for both: set policy.generation.refit_transport: collective."
        )
    handle = devices[own]
    if handle["name"] in _here:
        return _here[handle["name"]]
    given = _bound(handle["rebuild"], handle["arguments"])
    # The sender's index of the device need not be the receiver's.
    given["storage_device"] = device.index if device.index is not None else torch.cuda.current_device()
    opened: torch.Tensor = handle["rebuild"](**given)
    return opened


def _bound(rebuild: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of torch's rebuilding function by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)
