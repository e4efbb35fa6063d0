"""Counts the bytes of tensors while code runs, also on tensors without data."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from rl_backends_hf.shards import local
from rl_backends_hf.torch_internals import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created while it is active, as long as they exist, without gradients.

    Args:
        model: its weights and gradients are left out.
        gloo: whether collectives copy their larger tensor, as those of gloo do.

    Attributes:
        saved: bytes at the end of the forward pass.
        peak: largest number of bytes.
    """

    def __init__(self, model: nn.Module, *, gloo: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gloo = gloo
        self.saved = self.peak = 0
        self._parameters = list(model.parameters())
        self._known = {id(local(tensor).untyped_storage()) for tensor in (*self._parameters, *model.buffers())}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and (key := id(storage := each.untyped_storage())) not in self._known:
                self._storages[key] = weakref.ref(storage, partial(self._forget, key))
        copied = 0
        if self._gloo and func.namespace == "c10d":
            copied = max((each.nbytes for each in tree_leaves(args) if isinstance(each, torch.Tensor)), default=0)
        self.peak = max(self.peak, self._live() + copied)
        return output

    def _forget(self, key: int, _: Any) -> None:
        self._storages.pop(key, None)

    def end_forward(self) -> None:
        """Record what the forward pass has saved for the backward pass."""
        self.saved = self._live()

    def _live(self) -> int:
        """The bytes now: FSDP2 resizes the storages of weights that it gathers."""
        sizes = {key: storage.nbytes() for key, found in self._storages.items() if (storage := found()) is not None}
        for parameter in self._parameters:
            if parameter.grad is not None:
                sizes.pop(id(local(parameter.grad).untyped_storage()), None)
        return sum(sizes.values())
