"""Weights under the names of their checkpoint, where Transformers holds several of them in one tensor; knows no refit.

Transformers 5 holds the experts of a layer in one tensor (`mlp.experts.gate_up_proj`) and writes them apart
(`mlp.experts.3.gate_proj.weight`). What travels from a policy to an engine has the names of the checkpoint, whichever backend
sends or receives it. How the two belong together is Transformers' own table, for every model that it has; found out here is
where each tensor lies in the one that holds it.
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
    """Where a tensor of the checkpoint lies.

    Attributes:
        held_in: the model's tensor that holds it, which is contiguous.
        shape: of the part.
        stride: of the part, in elements.
        offset: elements of the holder before its first.
    """

    held_in: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, holder: torch.Tensor) -> torch.Tensor:
        """The part, as a view."""
        flat = holder.view(-1)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


class CheckpointNames:
    """One model's names.

    A tensor keeps its own name where the checkpoint's is the same, or where what the checkpoint has is not a part of it but
    computed from it.

    Args:
        model: a model of Transformers; its class and config count, not its tensors.
        shapes: its tensors' shapes, by their names in the model.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._parts = _parts(model, self._shapes)
        self._held: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            self._held.setdefault(part.held_in, []).append(name)

    def manifest(self, own: RefitManifest) -> dict[str, tuple[tuple[int, ...], str]]:
        """The manifest `own` of the model's tensors, under the checkpoint's names, in the same order."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for holder, (shape, dtype) in own.items():
            for name in self._held.get(holder, ()):
                found[name] = (self._parts[name].shape, dtype)
            if holder not in self._held:
                found[holder] = (tuple(shape), dtype)
        return found

    def holders(self, names: Iterable[str]) -> list[str]:
        """The model's tensors that hold those named, each once, in the order of the names."""
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
        """The same as a mapping; a view is made when it is asked for, since a large mixture has tens of thousands.

        Args:
            live: the model's tensors.
        """
        return _Views(live, self._held, self._parts) if self._parts else live

    def together(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that hold the given ones in the same places, over the same memory; the reverse of `views`.

        Args:
            tensors: some or all of those that one holder has, by the checkpoint's names.

        Raises:
            WeightSyncError: they lie apart in memory.
        """
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            part = self._parts.get(name)
            holder = name if part is None else part.held_in
            whole = tensor if part is None else _around(tensor, part, self._shapes[holder])
            if whole is None or (holder in found and found[holder].data_ptr() != whole.data_ptr()):
                raise WeightSyncError(
                    f"Weight {name!r} is a tensor of its own in the policy and a part of {holder!r} in the engine: no sharing "
                    "by reference. Set policy.generation.refit_transport: shared_memory."
                )
            found[holder] = whole
        return found


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
    """By the checkpoint's name; only of tensors whose name or form differs there, in the order in which they lie."""
    from transformers.core_model_loading import revert_weight_conversion

    # A model that was loaded remembers what its folder needed, and one folder may be written otherwise than another.
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
    found: dict[str, Part] = {}
    for holder, tensors in inside.items():
        if [name for name, _ in tensors] == [holder] or sum(t.numel() for _, t in tensors) != empty[holder].numel():
            continue
        for name, tensor in sorted(tensors, key=lambda each: each[1].storage_offset()):
            found[name] = Part(holder, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return found


class _CopiesAreViews(TorchFunctionMode):
    """Inside, a tensor is never copied to be contiguous: what is only cut stays a view of what it was cut from."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _around(tensor: torch.Tensor, part: Part, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The contiguous tensor of which `tensor` is that part; None where its memory holds no such thing."""
    start = tensor.storage_offset() - part.offset
    numel = torch.Size(shape).numel()
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.stride() != part.stride or start < 0 or start + numel > room:
        return None
    return tensor.detach().as_strided((numel,), (1,), start).view(shape)
