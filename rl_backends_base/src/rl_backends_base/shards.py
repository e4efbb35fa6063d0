"""Tensors and modules that may be sharded over ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_core.errors import CheckpointError


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of others, as sharded and quantized tensors do."""
    return hasattr(tensor, "__tensor_flatten__")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: torch.Tensor = tensor.full_tensor()
    return gathered


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Set `target`, sharded or not, to the full tensor `value`, which every rank has, or to one that is sharded like it."""
    with torch.no_grad():
        if isinstance(target, DTensor) and not isinstance(value, DTensor):
            value = value.to(device=target.device, dtype=target.dtype)
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        local(target).copy_(local(value))


def copy_weights(target: nn.Module, build: Callable[[], nn.Module], *, folder: Path) -> None:
    """Set the parameters and buffers of a module, sharded or not, to those of the whole one that `build` reads from a folder.

    Raises:
        CheckpointError: it cannot be read, or names or shapes differ. Full memory is not an error of the folder.
    """
    try:
        given, own = build().state_dict(), target.state_dict()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (OSError, LookupError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} has no weights of this model: {error}") from error
    shapes = [{name: tuple(value.shape) for name, value in each.items() if torch.is_tensor(value)} for each in (own, given)]
    if differing := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        name, (expected, found) = differing[0], (each.get(differing[0], "absent") for each in shapes)
        raise CheckpointError(
            f"{folder} has no weights of this model: {len(differing)} tensors have other names or shapes: {name} is {found} "
            f"instead of {expected}."
        )
    for name in shapes[0]:
        fill(own[name], given[name])


def round_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Round the floating-point parameters, and no buffers; returns the module."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


@torch.no_grad()
def copy_from_files(module: nn.Module) -> None:
    """Copy weights that are mapped from files: they would change with a file that is overwritten in place."""
    for tensor in map(local, chain(module.parameters(), module.buffers())):
        tensor.data = tensor.clone()


@contextmanager
def placeholders_of_shards(module: nn.Module) -> Iterator[None]:
    """While the block runs, sharded parameters are replaced by plain, frozen ones of the full shape, which need no memory.

    Their values are undefined; their dtype and device are those of the shards.
    """
    of_modules = [(each, *item) for each in module.modules() for item in each.named_parameters(recurse=False)]
    sharded = [(holder, key, shards) for holder, key, shards in of_modules if isinstance(shards, DTensor)]
    for holder, key, shards in sharded:
        empty = torch.empty((), dtype=shards.dtype, device=shards.device)
        holder.register_parameter(key, nn.Parameter(empty.expand(shards.shape), requires_grad=False))
    try:
        yield
    finally:
        for holder, key, shards in sharded:
            holder.register_parameter(key, shards)


def reshard(module: nn.Module) -> None:
    """Free the weights that an FSDP2 module has gathered: after a forward pass, the root keeps them for a backward pass."""
    if isinstance(module, FSDPModule):
        module.reshard()
