"""Counts the bytes of tensors that a model creates, without their data: those of a microbatch, and those of pictures.

The worker's own scoring code runs, forward and backward. FSDP2 gathers and frees weights during that, in a process group of
torch's backend `fake`, whose collectives do nothing. Of pictures, only the pixels have no data: what depends on their sizes,
such as the windows of a vision tower, is computed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from rl_backends_base.shards import local
from rl_backends_hf.pictures import Pictures, has_rope_grid
from rl_backends_hf.torch_internals import TorchDispatchMode, tree_leaves, without_data
from rl_core.data.images import ImageInputs, RowImage
from rl_core.errors import UserError


def picture_arguments(model: PreTrainedModel, fake: Any, images: Sequence[RowImage], rows: int, length: int) -> dict[str, Any]:
    """Arguments of the scoring model for pictures whose pixels have no data; their sizes have some, to compute windows."""
    if not images:
        return {}
    features = model.base_model.get_image_features

    def computed(**arguments: Any) -> Any:
        fake.computes = True
        try:
            return features(**arguments)
        finally:
            fake.computes = False

    model.base_model.get_image_features = computed
    fake.computes = True
    without_pixels = [
        replace(image, inputs=ImageInputs({name: _pixels_without_data(each, fake) for name, each in image.inputs.items()}))
        for image in images
    ]
    pictures = Pictures.of(without_pixels)
    fake.computes = False
    positions = {"position_ids": torch.zeros(3, rows, length, dtype=torch.int64)} if has_rope_grid(model) else {}
    return {"pictures": pictures, **positions}


def _pixels_without_data(tensor: torch.Tensor, fake: Any) -> Any:
    return fake.from_tensor(tensor) if tensor.is_floating_point() else tensor


def features_bytes(model: PreTrainedModel, images: Sequence[RowImage]) -> int:
    """Peak bytes while the features of pictures are computed without gradients."""
    with without_data() as fake:
        model.to_empty(device="cpu")
        live = LiveBytes(model, gloo=False)
        with live, torch.no_grad():
            pictures: Pictures = picture_arguments(model, fake, images, 1, 1)["pictures"]
            pictures.embed(model, torch.zeros(1, 1, dtype=torch.int64))
    return live.peak


def weighted_depths(kinds: Sequence[Hashable], *, least: int, step: int) -> list[tuple[int, float]]:
    """Smaller depths to which a model is traced, and the weight of each in the sum that stands for the whole model.

    A trace is a constant and what each layer of a kind adds. The first layers to some depths are chosen so that a weighted sum
    of their numbers by kind is that of all layers: with layers of one kind, those to `least` and `least + step`.

    Args:
        kinds: the kind of each layer.
        least: smallest depth.
        step: difference between depths; fewer for the last.
    """
    names = list(dict.fromkeys(kinds))

    def terms(depth: int) -> list[float]:
        counts = Counter(kinds[:depth])
        return [1.0, *(float(counts[name]) for name in names)]

    depths, whole = list[int](), torch.tensor(terms(len(kinds)), dtype=torch.float64)
    for depth in (*range(least, len(kinds), step), len(kinds)):
        known = torch.tensor([terms(each) for each in (*depths, depth)], dtype=torch.float64).T
        if int(torch.linalg.matrix_rank(known)) > len(depths):
            depths.append(depth)
            weights = torch.linalg.lstsq(known, whole.unsqueeze(1)).solution[:, 0]
            if torch.allclose(known @ weights, whole):
                break
    return list(zip(depths, weights.tolist(), strict=True))


@contextmanager
def lone_shard(shards: int) -> Iterator[None]:
    """The first of several ranks, in a group whose other ranks do not exist; none for one.

    Raises:
        UserError: this process already has a process group.
    """
    if shards == 1:
        yield
        return
    if dist.is_initialized():
        raise UserError("FSDP2 can only be planned in a process without a torch.distributed group.")
    dist.init_process_group("fake", rank=0, world_size=shards)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created while it is active, as long as they exist, without gradients.

    Args:
        model: its weights and gradients are left out.
        gloo: whether collectives copy their larger tensor, as those of gloo do.
        resizes: whether storages change their size, as with FSDP2; counting then takes longer.

    Attributes:
        saved: bytes at the end of the forward pass.
        peak: largest number of bytes.
    """

    def __init__(self, model: nn.Module, *, gloo: bool, resizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gloo, self._resizes = gloo, resizes
        self.saved = self.peak = self._sum = 0
        self._parameters = list(model.parameters())
        self._known = {id(local(tensor).untyped_storage()) for tensor in (*self._parameters, *model.buffers())}
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        for parameter in () if resizes else self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._leave_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if not isinstance(each, torch.Tensor):
                continue
            key = id(storage := each.untyped_storage())
            if key not in self._known and key not in self._storages:
                self._storages[key] = weakref.ref(storage, partial(self._forget, key)), storage.nbytes()
                self._sum += self._storages[key][1]
        copied = 0
        if self._gloo and func.namespace == "c10d":
            copied = max((each.nbytes for each in tree_leaves(args) if isinstance(each, torch.Tensor)), default=0)
        self.peak = max(self.peak, self._live() + copied)
        return output

    def _leave_out(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._forget(id(parameter.grad.untyped_storage()), None)

    def _forget(self, key: int, _: Any) -> None:
        self._sum -= self._storages.pop(key, (None, 0))[1]

    def end_forward(self) -> None:
        """Record what the forward pass has saved for the backward pass."""
        self.saved = self._live()

    def _live(self) -> int:
        """The bytes now: FSDP2 resizes the storages of weights that it gathers."""
        if not self._resizes:
            return self._sum
        sizes = {key: storage.nbytes() for key, (found, _) in self._storages.items() if (storage := found()) is not None}
        for parameter in self._parameters:
            if parameter.grad is not None:
                sizes.pop(id(local(parameter.grad).untyped_storage()), None)
        return sum(sizes.values())
