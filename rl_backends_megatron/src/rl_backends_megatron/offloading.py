"""Moves tensors between a device and pinned host memory in place, so that Megatron's views of them stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Offloader:
    """Tensors that leave the device while nothing computes with them.

    Only the memory of a storage is freed: parameters that are views of one buffer, and buckets of the distributed optimizer,
    are valid again after `restore`. Host memory is kept for the next `offload`, because pinning it takes longer than a copy.

    Args:
        tensors: returns the tensors; called at each `offload`.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        """All bytes of each storage that was freed, and their copy in host memory."""
        self._kept: dict[StorageWeakRef, torch.Tensor] = {}
        """Host memory by storage."""

    def offload(self) -> None:
        """Copy the tensors to host memory and free them; does nothing for those that have no memory."""
        storages = {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in self._tensors()}
        for identity, tensor in storages.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self._kept.get(identity)
            if host is None or host.numel() != everything.numel():
                host = torch.empty(everything.numel(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
                self._kept[identity] = host
            host.copy_(everything, non_blocking=True)
            self._offloaded.append((everything, host))
        if any(everything.is_cuda for everything, _ in self._offloaded):
            torch.cuda.current_stream().synchronize()
        for everything, _ in self._offloaded:
            everything.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Copy the tensors back; does nothing if they are on the device."""
        for everything, host in self._offloaded:
            everything.untyped_storage().resize_(host.numel())
            everything.copy_(host, non_blocking=True)
        self._offloaded.clear()
