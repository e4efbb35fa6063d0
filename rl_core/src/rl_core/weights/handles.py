"""The return value of `get_weights_ipc_handles`, which is the argument of `update_weights`: created and opened here.

A mapping with `kind`, `refit`, `weight_version`, `num_bytes`, and by kind:
`shared_memory` - `segment` and `placements`; `cuda_ipc` - `devices`, GPU uuid to a handle of a buffer there, and `placements`;
`by_reference` - `tensors`; `disk` - `file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.weights.cuda_ipc import open_buffer
from rl_core.weights.disk import read_tensors
from rl_core.weights.manifest import Placement
from rl_core.weights.shared_memory import MappedSegments


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
