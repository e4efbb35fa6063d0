"""Keeps tensors of a GPU in host memory while nothing computes with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_backends_base.shards import has_parts


class HostMemory:
    """Moves tensors between a GPU and host memory that is allocated once and kept, because pinning it takes longer than a copy.

    The host does not wait for the copies: it calls `torch.cuda.synchronize` before it reads what has left the GPU. A weight
    without gradient is copied to the host once, and later only dropped on the GPU. Shards of FSDP2 use the pinned memory that
    torch keeps; quantized ones are copied to new memory.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}

    def move(self, key: Hashable, tensor: torch.Tensor, device: torch.device, *, is_frozen: bool = False) -> torch.Tensor:
        """The tensor on `device`.

        Args:
            key: identifies the tensor's host memory.
            tensor: on either device.
            device: the GPU, or the CPU.
            is_frozen: the values never change.
        """
        if has_parts(tensor) and not isinstance(tensor, DTensor):
            return self._move_parts(key, tensor, device)
        if device.type != "cpu" or tensor.device.type == "cpu" or isinstance(tensor, DTensor):
            return tensor.to(device, non_blocking=True)
        host = self._kept.get(key)
        if host is not None and is_frozen:
            return host
        if host is None:
            host = self._kept[key] = torch.empty_like(tensor, device=device, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _move_parts(self, key: Hashable, tensor: Any, device: torch.device) -> torch.Tensor:
        names, attributes = tensor.__tensor_flatten__()
        parts = {name: self.move((key, name), getattr(tensor, name), device) for name in names}
        moved: torch.Tensor = type(tensor).__tensor_unflatten__(parts, attributes, tensor.shape, tensor.stride())
        return moved

    def move_module(self, module: nn.Module, device: torch.device) -> None:
        """Move the parameters and buffers of a module, in place."""
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            module.to(device, non_blocking=True)
            return
        for name, parameter in module.named_parameters():
            parameter.data = self.move(name, parameter.data, device, is_frozen=not parameter.requires_grad)
        for name, buffer in module.named_buffers():
            buffer.data = self.move(name, buffer.data, device)


class HostedModel:
    """A frozen model that is kept in CPU memory, pinned for a GPU, and moved to the device while it scores."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The weights and their pinned memory, which stays when they are copied to the device."""
        if device.type != "cpu":
            weights = (*model.parameters(), *model.buffers())
            # torch moves shards itself.
            moved = (each for each in weights if each.device.type == "cpu" and not isinstance(each, DTensor))
            self._on_host = [(weight, weight.data.pin_memory()) for weight in moved]

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        for weight, host in self._on_host:
            weight.data = host.to(self._device, non_blocking=True)
        try:
            yield self._model
        finally:
            for weight, host in self._on_host:
                weight.data = host
