"""What `get_weights_ipc_handles` returns and `update_weights` opens: made on one side, unpacked on the other; loads nothing.

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
from rl_core.weights.shared_memory import map_segment


def merge_handles(per_rank: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One mapping from what every rank of a policy returned: rank 0's, with the GPUs of all ranks."""
    given = [dict(handles) for handles in per_rank if handles]
    if not given:
        raise WeightSyncError("No rank of the policy handed over its weights: rank 0 must.")
    merged = given[0]
    if "devices" in merged:
        merged["devices"] = {uuid: found for handles in given for uuid, found in handles["devices"].items()}
    return merged


def open_handles(handles: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Name to tensor, as views of the sender's memory: copy them and let them go.

    Args:
        handles: one bucket.
        device: where the receiver computes; CUDA IPC reaches the sender's memory on that GPU alone.

    Raises:
        WeightSyncError: the memory cannot be reached from this process.
    """
    kind = handles.get("kind")
    if kind == "by_reference":
        return dict(handles["tensors"])
    if kind == "shared_memory":
        return _placed(handles, map_segment(handles["segment"], size=handles["num_bytes"]))
    if kind == "cuda_ipc":
        return _placed(handles, open_buffer(handles["devices"], device))
    if kind == "disk":
        return dict(read_tensors(handles["file"], device))
    raise WeightSyncError(f"Weights came as {kind!r}; known are shared_memory, cuda_ipc, by_reference and disk.")


def _placed(handles: Mapping[str, Any], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    placements: Mapping[str, Placement] = handles["placements"]
    return {name: placement.view(buffer) for name, placement in placements.items()}
