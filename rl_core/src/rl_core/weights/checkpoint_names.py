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
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest


@dataclass(frozen=True)
class Part:
    """Location of a tensor of the checkpoint.

    Attributes:
        held_in: the model's tensor that holds it, which is contiguous.
        shape: shape of the view.
        stride: strides of the view, in elements.
        offset: elements of the holder before its first.
    """

    held_in: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, holder: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view."""
        flat = holder.view(-1)
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
        self._parts = _parts(model, self._shapes)
        self._held: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            self._held.setdefault(part.held_in, []).append(name)

    def manifest(self, own: RefitManifest) -> dict[str, tuple[tuple[int, ...], str]]:
        """The manifest `own` of the model's tensors, converted to the checkpoint's names, in the same order."""
        manifest: dict[str, tuple[tuple[int, ...], str]] = {}
        for holder, (shape, dtype) in own.items():
            for name in self._held.get(holder, ()):
                manifest[name] = (self._parts[name].shape, dtype)
            if holder not in self._held:
                manifest[holder] = (tuple(shape), dtype)
        return manifest

    def holders(self, names: Iterable[str]) -> list[str]:
        """The model's tensors that hold the named ones, each once, in the order of the names."""
        return list(dict.fromkeys(self._parts[name].held_in if name in self._parts else name for name in names))

    def apart(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of each tensor of the checkpoint.

        Args:
            weights: the model's tensors.
            names: only these; all by default.
        """
        wanted = None if names is None else set(names)
        for holder, tensor in weights:
            for name in self._held.get(holder, [holder]):
                if wanted is None or name in wanted:
                    yield name, self._parts[name].of(tensor) if name in self._parts else tensor

    def views(self, live: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same as a mapping; views are created on access, since a large mixture of experts has tens of thousands.

        Args:
            live: the model's tensors.
        """
        return _Views(live, self._held, self._parts) if self._parts else live

    def together(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that hold the given ones, over the same memory; the reverse of `views`.

        Args:
            tensors: some or all tensors of one holder, by the checkpoint's names.

        Raises:
            WeightSyncError: they are not contiguous in memory.
        """
        joined: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            part = self._parts.get(name)
            holder = name if part is None else part.held_in
            whole = tensor if part is None else _around(tensor, part, self._shapes[holder])
            if whole is None or (holder in joined and joined[holder].data_ptr() != whole.data_ptr()):
                raise WeightSyncError(
                    f"Weight {name!r} is a separate tensor in the policy but a part of {holder!r} in the engine, so it cannot "
                    "be shared by reference. Set policy.generation.refit_transport: shared_memory."
                )
            joined[holder] = whole
        return joined


class _Views(Mapping[str, torch.Tensor]):
    def __init__(self, live: Mapping[str, torch.Tensor], held: Mapping[str, list[str]], parts: Mapping[str, Part]) -> None:
        self._live, self._parts = live, parts
        self._names = dict.fromkeys(name for holder in live for name in held.get(holder, [holder]))

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        return self._live[name] if part is None else part.of(self._live[part.held_in].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _parts(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """By the checkpoint's name; only tensors whose name or form differs there, in memory order."""
    from transformers.core_model_loading import revert_weight_conversion

    # A loaded model remembers what its own folder needed, which may differ from what another folder needs.
    fresh = copy.copy(model)
    fresh.__dict__.pop("_weight_conversions", None)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _CopiesAreViews(), torch.no_grad():
        written: dict[str, torch.Tensor] = revert_weight_conversion(fresh, dict(empty))
    whose = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    inside: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in written.items():
        holder = whose.get(tensor.untyped_storage()._cdata)
        if holder is not None:
            inside.setdefault(holder, []).append((name, tensor))
    parts: dict[str, Part] = {}
    for holder, tensors in inside.items():
        if [name for name, _ in tensors] == [holder] or sum(t.numel() for _, t in tensors) != empty[holder].numel():
            continue
        for name, tensor in sorted(tensors, key=lambda each: each[1].storage_offset()):
            parts[name] = Part(holder, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return parts


class _CopiesAreViews(TorchFunctionMode):
    """Within the block, tensors are never copied to be contiguous: slices stay views of the original."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _around(tensor: torch.Tensor, part: Part, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The contiguous tensor that `tensor` is this part of; None if there is none in its memory."""
    start = tensor.storage_offset() - part.offset
    numel = torch.Size(shape).numel()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.stride() != part.stride or start < 0 or start + numel > room:
        return None
    return tensor.detach().as_strided((numel,), (1,), start).view(shape)
