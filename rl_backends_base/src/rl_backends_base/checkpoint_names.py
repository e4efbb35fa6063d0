"""Maps weights to the names of their checkpoint, for models whose tensors each hold several tensors of the checkpoint.

Transformers 5 stores the experts of a layer in one tensor (`mlp.experts.gate_up_proj`) but saves them separately
(`mlp.experts.3.gate_proj.weight`). Weights sent from a policy to an engine have the names of the checkpoint, whichever backend
sends or receives them. The mapping is Transformers' own table, for every model that it has; this module determines each
tensor's location within the tensor that holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from rl_core.errors import TransportDeclinedError
from rl_core.interfaces.policy import RefitManifest

OF_TENSOR: Final = "_lora"
"""End of the name of a layer that consists of the adapters of a tensor of experts, after that of the tensor."""


@dataclass(frozen=True)
class Slice:
    """Location of a tensor of the checkpoint within a tensor of the model.

    Attributes:
        container: the model's tensor that holds it, which is contiguous.
        shape: shape of the view.
        stride: strides of the view, in elements.
        offset: elements of the container before its first.
    """

    container: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, container: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view."""
        flat = container.view(-1)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


class CheckpointNames:
    """Checkpoint names of one model.

    A tensor keeps its own name if the checkpoint uses the same one, or if the checkpoint's tensor is computed from it and not
    a part of it.

    Args:
        model: a Transformers model; only its class and config matter, not its tensors.
        shapes: its tensors' shapes, by their names in the model.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._slices = _slices_of(model, self._shapes)
        self._names_in: dict[str, list[str]] = {}
        for name, location in self._slices.items():
            self._names_in.setdefault(location.container, []).append(name)

    def manifest(self, own: RefitManifest) -> dict[str, tuple[tuple[int, ...], str]]:
        """The manifest `own` of the model's tensors, converted to the checkpoint's names, in the same order."""
        manifest: dict[str, tuple[tuple[int, ...], str]] = {}
        for container, (shape, dtype) in own.items():
            for name in self._names_in.get(container, ()):
                manifest[name] = (self._slices[name].shape, dtype)
            if container not in self._names_in:
                manifest[container] = (tuple(shape), dtype)
        return manifest

    def containers(self, names: Iterable[str]) -> list[str]:
        """The model's tensors that hold the named ones, each once, in the order of the names."""
        return list(dict.fromkeys(self._slices[name].container if name in self._slices else name for name in names))

    def split(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, as views of the model's tensors, each with its name.

        Args:
            weights: the model's tensors.
            names: names to yield; all by default.
        """
        wanted = None if names is None else set(names)
        for container, tensor in weights:
            for name in self._names_in.get(container, [container]):
                if wanted is None or name in wanted:
                    yield name, self._slices[name].of(tensor) if name in self._slices else tensor

    def view_by_name(self, live: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """As `split`, but as a mapping that creates views on access: a large mixture of experts has tens of thousands.

        Args:
            live: the model's tensors.
        """
        return _Views(live, self._names_in, self._slices) if self._slices else live

    def merge(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors that contain the given ones, in the same memory; the inverse of `view_by_name`.

        Args:
            tensors: some or all tensors of one container, by the checkpoint's names.

        Raises:
            TransportDeclinedError: they are not contiguous in memory.
        """
        joined: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            location = self._slices.get(name)
            container = name if location is None else location.container
            whole = tensor if location is None else _around(tensor, location, self._shapes[container])
            if whole is None or (container in joined and joined[container].data_ptr() != whole.data_ptr()):
                raise TransportDeclinedError(
                    f"Weight {name!r} is a separate tensor in the policy but a part of {container!r} in the engine, so it "
                    "cannot be shared by reference. Set policy.generation.refit_transport: shared_memory."
                )
            joined[container] = whole
        return joined


class _Views(Mapping[str, torch.Tensor]):
    def __init__(self, live: Mapping[str, torch.Tensor], names: Mapping[str, list[str]], slices: Mapping[str, Slice]) -> None:
        self._live, self._slices = live, slices
        self._names = dict.fromkeys(name for container in live for name in names.get(container, [container]))

    def __getitem__(self, name: str) -> torch.Tensor:
        location = self._slices.get(name)
        return self._live[name] if location is None else location.of(self._live[location.container].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _slices_of(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slice]:
    """The location of each tensor, by its name in the checkpoint; only tensors whose name or shape differs there."""
    from transformers.core_model_loading import revert_weight_conversion

    # A loaded model remembers what its own folder needed, which may differ from what another folder needs.
    fresh = copy.copy(model)
    fresh.__dict__.pop("_weight_conversions", None)
    # No checkpoint has the adapters of a tensor of experts, and what renames the tensor would tear their names apart.
    own = {name for name in shapes if name.partition(".lora_")[0].removesuffix(OF_TENSOR) in shapes and ".lora_" in name}
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in own}
    with _CopiesAreViews(), torch.no_grad():
        written: dict[str, torch.Tensor] = revert_weight_conversion(fresh, dict(empty))
    containers = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in empty.items()}
    inside: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in written.items():
        container = containers.get(StorageWeakRef(tensor.untyped_storage()))
        if container is not None:
            inside.setdefault(container, []).append((name, tensor))
    slices: dict[str, Slice] = {}
    for container, tensors in inside.items():
        if [name for name, _ in tensors] == [container] or sum(t.numel() for _, t in tensors) != empty[container].numel():
            continue
        for name, tensor in sorted(tensors, key=lambda each: each[1].storage_offset()):
            slices[name] = Slice(container, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return slices


class _CopiesAreViews(TorchFunctionMode):
    """Within the block, tensors are never copied to be contiguous: slices stay views of the original."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _around(tensor: torch.Tensor, location: Slice, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The contiguous tensor that has `tensor` at this location; None if there is none in its memory."""
    start = tensor.storage_offset() - location.offset
    numel = torch.Size(shape).numel()
    capacity = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.stride() != location.stride or start < 0 or start + numel > capacity:
        return None
    return tensor.detach().as_strided((numel,), (1,), start).view(shape)
