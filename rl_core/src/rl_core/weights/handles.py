"""What `get_weights_ipc_handles` returns and `update_weights` opens: made on one side, unpacked on the other; loads nothing.

A mapping with `kind`, `refit`, `weight_version`, `num_bytes`, and by kind:
`shared_memory` - `segment` and `placements`; `cuda_ipc` - `devices`: GPU uuid to name to handle; `by_reference` - `tensors`;
`disk` - `file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rl_core.errors import WeightSyncError
from rl_core.weights.disk import read_tensors
from rl_core.weights.manifest import Placement
from rl_core.weights.shared_memory import map_segment


def cuda_handles(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """CUDA IPC handles of tensors that lie on this process's GPU, keyed by the GPU's uuid; nothing is copied.

    Returns:
        The `devices` entry, and the tensors, which must be kept alive until the receivers have let go.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    kept: list[torch.Tensor] = []
    reduced: dict[str, Any] = {}
    for name, tensor in tensors:
        kept.append(tensor.detach().contiguous())
        reduced[name] = reduce_tensor(kept[-1])
    if not kept:
        return {}, kept
    torch.cuda.current_stream().synchronize()
    return {device_uuid(kept[0].device): reduced}, kept


def device_uuid(device: torch.device) -> str:
    """The GPU's own identity; an index means another GPU in each process that CUDA_VISIBLE_DEVICES differs in."""
    return str(torch.cuda.get_device_properties(device).uuid)


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
        return _open_segment(handles)
    if kind == "cuda_ipc":
        return _open_cuda(handles["devices"], device)
    if kind == "disk":
        return dict(read_tensors(handles["file"], device))
    raise WeightSyncError(f"Weights came as {kind!r}; known are shared_memory, cuda_ipc, by_reference and disk.")


def _open_segment(handles: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    buffer = map_segment(handles["segment"], size=handles["num_bytes"])
    placements: Mapping[str, Placement] = handles["placements"]
    return {name: placement.view(buffer) for name, placement in placements.items()}


def _open_cuda(devices: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    if device.type != "cuda":
        raise WeightSyncError("The policy hands over weights on a GPU and this generation worker computes on the CPU.")
    uuid = device_uuid(device)
    if uuid not in devices:
        raise WeightSyncError(
            f"This generation worker computes on GPU {uuid}; the policy has its weights on {', '.join(devices)}. CUDA IPC "
            "needs one GPU for both: set policy.generation.refit_transport: collective."
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    opened = {}
    for name, (rebuild, arguments) in devices[uuid].items():
        # Argument 6 of rebuild_cuda_tensor is the sender's index of the device, which need not be the receiver's.
        opened[name] = rebuild(*arguments[:6], index, *arguments[7:])
    return opened
