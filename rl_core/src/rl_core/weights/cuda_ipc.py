"""Buffers on one GPU that other processes of the node can map; and the handles of a refit, on any medium.

Only buffers are shared, never a model's own tensors. Torch counts the receivers of a shared storage: a handle that is never
opened (a policy rank on a GPU without an engine) would keep its memory forever, and a parameter shared in every refit would get
another wrapper each time. Copying into the buffer costs a thousandth of a second per gigabyte.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from rl_core.errors import WeightSyncError
from rl_core.weights.disk import read_tensors
from rl_core.weights.manifest import Placement
from rl_core.weights.shared_memory import MappedSegments

_here: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
"""The buffers of this process, by their name in handles: CUDA cannot map memory into the process that owns it."""


class GpuBuffer:
    """`size` bytes on this process's GPU, shared once for their whole lifetime."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self.size = size
        self.bytes = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        """[size] uint8."""
        self._name = uuid.uuid4().hex
        self._shared: tuple[Any, tuple[Any, ...]] | None = None
        _here[self._name] = self.bytes

    def handle(self) -> dict[str, Any]:
        """The argument of `open_buffer`, once all earlier writes have reached the GPU's memory."""
        from torch.multiprocessing.reductions import reduce_tensor

        if self._shared is None:
            self._shared = reduce_tensor(self.bytes)
        torch.cuda.current_stream(self.bytes.device).synchronize()
        rebuild, arguments = self._shared
        return {"name": self._name, "rebuild": rebuild, "arguments": arguments}

    def close(self) -> None:
        """Free the memory; the receivers have released it. Calling it twice is fine."""
        shared, self._shared = self._shared, None
        if shared is not None:
            # Torch waits for one receiver of each sharing, and there may have been none; actual receivers have counted too.
            arguments = _bound(*shared)
            self.bytes.untyped_storage()._release_ipc_counter(
                arguments["ref_counter_handle"], arguments["ref_counter_offset"], device=self.bytes.device
            )
        self.bytes = torch.empty(0, dtype=torch.uint8)


def device_uuid(device: torch.device) -> str:
    """The GPU's UUID; an index depends on each process's CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_buffer(devices: Mapping[str, Mapping[str, Any]], device: torch.device) -> torch.Tensor:
    """The sender's buffer, uint8; it is unmapped with the last tensor over it.

    Args:
        devices: GPU uuid to the result of `GpuBuffer.handle` there.
        device: the receiver's device.

    Raises:
        WeightSyncError: the memory is not accessible from there.
    """
    if device.type != "cuda":
        raise WeightSyncError("The policy sends weights on a GPU, but this generation worker computes on the CPU.")
    uuid = device_uuid(device)
    if uuid not in devices:
        raise WeightSyncError(
            f"This generation worker computes on GPU {uuid}, but the policy has its weights on {', '.join(devices)}. CUDA IPC "
            "requires the same GPU for both: set policy.generation.refit_transport: collective."
        )
    handle = devices[uuid]
    if handle["name"] in _here:
        return _here[handle["name"]]
    given = _bound(handle["rebuild"], handle["arguments"])
    # The sender's index of the device may differ from the receiver's.
    given["storage_device"] = device.index if device.index is not None else torch.cuda.current_device()
    opened: torch.Tensor = handle["rebuild"](**given)
    return opened


def _bound(rebuild: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of torch's rebuilding function by name."""
    return dict(inspect.signature(rebuild).bind(*arguments).arguments)


def merge_handles(per_rank: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Merge the mappings of all ranks of a policy: rank 0's, with the GPUs of all ranks."""
    handles_per_rank = [dict(handles) for handles in per_rank if handles]
    if not handles_per_rank:
        raise WeightSyncError("Rank 0 of the policy did not return its weights.")
    merged = handles_per_rank[0]
    if "devices" in merged:
        merged["devices"] = {uuid: device for handles in handles_per_rank for uuid, device in handles["devices"].items()}
    return merged


def open_handles(
    handles: Mapping[str, Any], device: torch.device, segments: MappedSegments | None = None
) -> dict[str, torch.Tensor]:
    """Name to tensor, as views of the sender's memory: copy and release them.

    Args:
        handles: one bucket.
        device: the receiver's device; CUDA IPC requires the sender's GPU.
        segments: keeps shared memory mapped for later buckets; by default it is mapped for this one only.

    Raises:
        WeightSyncError: the memory is not accessible from this process.
    """
    kind = handles.get("kind")
    if kind == "by_reference":
        return dict(handles["tensors"])
    if kind == "shared_memory":
        return _placed(handles, (segments or MappedSegments()).map(handles["segment"], size=handles["num_bytes"]))
    if kind == "cuda_ipc":
        return _placed(handles, open_buffer(handles["devices"], device))
    if kind == "disk":
        return dict(read_tensors(handles["file"], device))
    raise WeightSyncError(f"Unknown kind of weights {kind!r}: expected shared_memory, cuda_ipc, by_reference or disk.")


def _placed(handles: Mapping[str, Any], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    placements: Mapping[str, Placement] = handles["placements"]
    return {name: placement.view(buffer) for name, placement in placements.items()}
