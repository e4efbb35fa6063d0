"""State of optimizers that keep it quantized: those of torchao, such as `torchao.optim.AdamW8bit`.

A quantized tensor (https://arxiv.org/abs/2110.02861) consists of plain ones: codes, one scale for each block of codes, and the
values of the codes. Blocks do not end where the rows of a weight end, so other shards of it have other blocks: a checkpoint
has the plain tensors of each shard, and only the same number of shards can continue from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rl_backends_hf.shards import has_parts, local
from rl_core.errors import CheckpointError

_PREFIX: Final = "quantized-"


def is_quantized(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer may keep quantized state."""
    return type(optimizer).__module__.partition(".")[0] == "torchao"


def plain_tensors(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of this rank's shard of a tensor, by name; `{"": shard}` if it is not quantized."""
    shard: Any = local(value)
    if not has_parts(shard):
        return {"": shard}
    return {name: getattr(shard, name) for name in shard.__tensor_flatten__()[0]}


def shard_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, shard: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """This rank's tensors of the optimizer's state, by their names in a checkpoint.

    Args:
        optimizer: the optimizer.
        parameters: name to parameter.
        shard: which shard of the weights this rank has, from 0, and how many there are.
    """
    prefix = f"{_PREFIX}{shard[0]}-of-{shard[1]}"
    return {
        f"{prefix}.{name}.{key}.{part}": tensor
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
        for part, tensor in plain_tensors(value).items()
    }


def has_state(stored: Iterable[str]) -> bool:
    """Whether entries of a checkpoint are quantized state; before the first step, there is none."""
    return any(key.startswith(_PREFIX) for key in stored)


def create_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let the optimizer create the state of parameters, which keep their values, by steps with gradients of 0."""
    for parameter in parameters:
        values = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
        with torch.no_grad():
            parameter.copy_(values)


def check_stored(expected: Mapping[str, torch.Tensor], stored: Mapping[str, Any], folder: Path, *, shards: int) -> None:
    """Check that a checkpoint has the tensors that this rank loads.

    Args:
        expected: by name.
        stored: metadata by name.
        folder: the checkpoint, for errors.
        shards: into how many shards this run divides the weights.

    Raises:
        CheckpointError: it is of another number of shards, or of another model.
    """
    before = {int(key.partition(".")[0].rpartition("-")[2]) for key in stored if key.startswith(_PREFIX)}
    for other in before - {shards}:
        raise CheckpointError(
            f"{folder} has quantized optimizer state of {other} shard(s) of the weights, and this run has {shards}. Quantized "
            "state cannot be divided differently: use as many shards as before, or start a new run from the weights.",
            key="policy.optimizer.name",
        )
    for key, tensor in expected.items():
        size = tuple(stored[key].size) if key in stored else None
        if size != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder} is of another model: its entry {key} has shape {size}, not {tuple(tensor.shape)}. Resume with the "
                "`policy.model_name` that it was written with.",
                key="policy.model_name",
            )
