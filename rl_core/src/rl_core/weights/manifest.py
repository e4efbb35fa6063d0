"""Describes a set of weights: names, shapes, dtypes and their split into buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from rl_core.errors import WeightSyncError
from rl_core.interfaces.policy import RefitManifest

ALIGNMENT = 64
"""Bytes; every tensor of a bucket starts at a multiple of this, so that any dtype can be viewed in place."""
ON_ONE_THREAD = 2**15 - 64
"""Elements; torch casts 2**15 or more on all of its threads, which the other side of a refit needs at that time."""


@dataclass(frozen=True)
class Placement:
    """Location of one tensor in a bucket."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Bytes from the bucket's start."""

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the bucket's bytes, `buffer` [bytes] uint8."""
        dtype = dtype_of(self.dtype)
        length = math.prod(self.shape) * dtype.itemsize
        return buffer[self.offset : self.offset + length].view(dtype).view(self.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in a manifest, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a manifest's name.

    Raises:
        WeightSyncError: torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"The manifest has the dtype {name!r}, which this torch ({torch.__version__}) does not support.")
    return dtype


def tensor_bytes(shape: Iterable[int], dtype: str) -> int:
    """Number of bytes of a contiguous tensor."""
    return math.prod(shape) * dtype_of(dtype).itemsize


def manifest_to_send(manifest: RefitManifest, receiver_dtypes: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype in which each weight is sent: in the receiver's dtype if it is narrower, since it would round anyway.

    Args:
        manifest: the policy's.
        receiver_dtypes: name to the receiver's dtype.
    """
    to = receiver_dtypes
    return {name: (tuple(shape), _narrower(dtype, to.get(name, dtype))) for name, (shape, dtype) in manifest.items()}


def _narrower(own: str, other: str) -> str:
    both_float = dtype_of(own).is_floating_point and dtype_of(other).is_floating_point
    return other if both_float and dtype_of(other).itemsize < dtype_of(own).itemsize else own


def manifest_of(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, dtype name) of each tensor, in the same order."""
    return {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in weights.items()}


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's live parameters and persistent buffers; tied tensors only under their first name."""
    saved = module.state_dict(keep_vars=True).keys()
    weights: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=True))
    weights.update((name, tensor) for name, tensor in module.named_buffers(remove_duplicate=True) if name in saved)
    return weights


def refuse_differences(manifest: RefitManifest, engine: RefitManifest) -> None:
    """Compare the weights to be sent with the engine's; dtypes may differ, since loading casts.

    Raises:
        WeightSyncError: lists every tensor that only one side has or whose shape differs.
    """
    differences = [f"{name}: the policy sends it, but the engine has no such weight" for name in manifest if name not in engine]
    differences += [f"{name}: the engine has it, but the policy does not send it" for name in engine if name not in manifest]
    differences += [
        f"{name}: {list(shape)} in the policy, {list(engine[name][0])} in the engine"
        for name, (shape, _) in manifest.items()
        if name in engine and tuple(engine[name][0]) != tuple(shape)
    ]
    if differences:
        raise WeightSyncError(
            "The policy's weights do not match the generation backend's model; nothing was loaded:\n"
            + "\n".join(f"  {line}" for line in sorted(differences))
            + "\nUse the same model on both sides (policy.model_name, policy.generation.model_name)."
        )


def split_into_buckets(manifest: RefitManifest, *, budget_bytes: int) -> list[list[str]]:
    """Names in the manifest's order, in buckets of at most `budget_bytes` (padding included).

    A tensor larger than the budget is a separate bucket, after all others, because a receiver waits for the first bucket and
    loads each one while the next is written. Weights of one module (`layers.0.mlp.gate_proj.weight`,
    `layers.0.mlp.up_proj.weight`) are in one bucket if they fit, so an engine that fuses them need not keep any for the next.
    """
    buckets: list[list[str]] = []
    room = 0
    for names in _neighbours(manifest, budget_bytes):
        needed = sum(_aligned(tensor_bytes(*manifest[name])) for name in names)
        if not buckets or needed > room:
            buckets.append([])
            room = budget_bytes
        buckets[-1].extend(names)
        room -= needed
    return sorted(buckets, key=lambda names: lay_out(manifest, names)[1] > budget_bytes)


def in_manifest_order(buckets: Sequence[Sequence[str]], manifest: RefitManifest) -> list[list[str]]:
    """The same tensors in the manifest's order, in which one pass gathers each module once.

    A bucket is split if a tensor of another bucket belongs between two of its tensors.
    """
    row = {name: number for number, name in enumerate(manifest)}
    ordered = sorted((row[name], number, name) for number, names in enumerate(buckets) for name in names)
    return [[name for *_, name in same] for _, same in groupby(ordered, key=itemgetter(1))]


def lay_out(manifest: RefitManifest, names: Iterable[str]) -> tuple[dict[str, Placement], int]:
    """Location of each named tensor in its bucket, and the bucket's size in bytes."""
    placements: dict[str, Placement] = {}
    end = 0
    for name in names:
        shape, dtype = manifest[name]
        placements[name] = Placement(tuple(shape), dtype, end)
        end += _aligned(tensor_bytes(shape, dtype))
    return placements, end


def fill(
    buffer: torch.Tensor,
    placements: Mapping[str, Placement],
    tensors: Iterator[tuple[str, torch.Tensor]],
    manifest: RefitManifest,
) -> None:
    """Copy every tensor to its location in the bucket, casting it to the dtype there.

    Raises:
        WeightSyncError: the tensors do not match the placements in names, shapes or dtypes.
    """
    waiting = dict(placements)
    for name, tensor in tensors:
        placement = waiting.pop(name, None)
        if placement is None:
            raise WeightSyncError(f"The policy gave {name!r}, which was not requested or was already given.")
        shape, dtype = manifest[name]
        if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (tuple(shape), dtype):
            raise WeightSyncError(
                f"The policy gave {name!r} as {dtype_name(tensor.dtype)} {list(tensor.shape)}, but its manifest says "
                f"{dtype} {list(shape)}: iter_weights and weight_manifest must agree."
            )
        _copy(placement.view(buffer), tensor.detach())
    if waiting:
        raise WeightSyncError(f"The policy did not give {', '.join(sorted(waiting))}: iter_weights left them out.")


def _neighbours(manifest: RefitManifest, budget_bytes: int) -> Iterator[list[str]]:
    """Names that stay together: the tensors of one module, or each separately if they exceed the budget together."""
    for _, group in groupby(manifest, key=lambda name: name.rsplit(".", 2)[0]):
        names = list(group)
        if sum(_aligned(tensor_bytes(*manifest[name])) for name in names) <= budget_bytes:
            yield names
        else:
            yield from ([name] for name in names)


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy on one thread: the receiver computes on the other cores, and torch would wait for all of them."""
    on_host = into.device.type == tensor.device.type == "cpu"
    if not on_host or not tensor.is_contiguous() or tensor.numel() == 0:
        into.copy_(tensor)
    elif tensor.dtype == into.dtype:
        np.copyto(into.view(-1).view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
    else:
        for part, source in zip(into.view(-1).split(ON_ONE_THREAD), tensor.view(-1).split(ON_ONE_THREAD), strict=True):
            part.copy_(source)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
