"""Builds the configured optimizer, and keeps what it updates: float32 master weights, and quantized state.

A bfloat16 weight has 8 bits of precision, so a step of 1e-5 times its size would be rounded away. The optimizer therefore
updates a float32 copy of each weight that is not float32; gradients of microbatches accumulate there in float32, and after a
step the copy is rounded into the model. Bytes per parameter with Adam: bfloat16 2 + copy 4 + gradient 4 + moments 8 = 18;
float32 4 + 4 + 8 = 16. With FSDP2, the sharded weights are float32 and are rounded when gathered: 16 bytes, divided by the
number of ranks.

The state of torchao's optimizers, such as `torchao.optim.AdamW8bit`, consists of quantized tensors
(https://arxiv.org/abs/2110.02861), which have plain ones as parts: codes, one scale for each block of codes, and the values of
the codes. Blocks do not end where the rows of a weight end, so other shards of it have other blocks: a checkpoint has the plain
tensors of each shard, and only the same number of shards can continue from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rl_backends_base.host_memory import HostMemory
from rl_backends_base.optimizer_settings import call_named
from rl_backends_base.shards import has_parts, local
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import CheckpointError, UserError, with_key
from rl_core.plugins.import_path import resolve

_log = logging.getLogger(__name__)

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""Extra keyword in `optimizer.kwargs`: if true, biases and norms (all one-dimensional tensors) have no weight decay."""


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters.

    torch's Adam and AdamW use their fused implementation (one pass over memory) unless `kwargs` specify otherwise.

    Args:
        parameters: name to parameter.
        config: import path and keyword arguments.

    Raises:
        UserError: the import path does not exist, the optimizer rejects the arguments, or its steps cannot be compiled.
    """
    with with_key("policy.optimizer.name"):
        factory = resolve(config.name, key="policy.optimizer.name")
    kwargs = dict(config.kwargs)
    matrices_only = kwargs.pop(DECAY_MATRICES_ONLY, False)
    if factory in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & kwargs.keys():
        kwargs["fused"] = True
    groups: Any = list(parameters.values())
    if matrices_only:
        groups = [
            {"params": [p for p in parameters.values() if p.ndim > 1]},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    optimizer = call_named(factory, groups, kwargs, key="policy.optimizer", also=(DECAY_MATRICES_ONLY,))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"`policy.optimizer.name`: {config.name} returned a {type(optimizer).__name__}, which is not a torch optimizer.",
            key="policy.optimizer.name",
        )
    if is_quantized(optimizer):
        _check_step(optimizer, config.name)
    return optimizer


class OptimizerChain(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, such as Muon for matrices and AdamW for the others.

    The schedule scales the learning rates of all; reported is that of the first.

    Args:
        parts: the optimizers, before their first step.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([parameter for part in parts for group in part.param_groups for parameter in group["params"]], {})
        self._parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer."""
        for part in self._parts:
            part.step()


def compile_error() -> type[Exception]:
    """The base class of what `torch.compile` raises; its module takes seconds to import."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def _check_step(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Take a step with one weight, which keeps its value, because torchao compiles steps."""
    try:
        create_state(optimizer, optimizer.param_groups[0]["params"][:1])
    except compile_error() as error:
        raise UserError(
            f"`policy.optimizer.name`: the steps of {name} cannot be compiled: {str(error).strip().splitlines()[0]} Compiling "
            "requires a C++ compiler on a CPU and Triton on a GPU. Install it, or use torch.optim.AdamW.",
            key="policy.optimizer.name",
        ) from error
    optimizer.state.clear()


class MasterWeights:
    """Parameters that the optimizer updates: the model's float32 parameters, and float32 copies of all others.

    Args:
        model: frozen parameters (without `requires_grad`) are excluded; tied ones occur once.
        model_dtype: dtype in which the weights are computed with, saved and exported.

    Attributes:
        parameters: name to parameter.
        are_rounded: whether exported weights are rounded, so that the masters must be saved separately.
    """

    def __init__(self, model: nn.Module, *, model_dtype: torch.dtype) -> None:
        self.are_rounded = model_dtype != torch.float32
        self.parameters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
                self._copies.append((parameter, master))
                parameter.register_post_accumulate_grad_hook(_AccumulateInto(master))
            self.parameters[name] = master

    @property
    def are_copies(self) -> bool:
        """Whether any master is a copy of a model weight."""
        return bool(self._copies)

    def copy_to_model(self) -> None:
        """Copy the master weights into the model, rounded to its dtype."""
        with torch.no_grad():
            for parameter, master in self._copies:
                parameter.copy_(master)

    def copy_from_model(self) -> None:
        """Set the masters to the model's weights."""
        with torch.no_grad():
            for parameter, master in self._copies:
                master.copy_(parameter)

    def load_exact(self, exact: Mapping[str, torch.Tensor]) -> None:
        """Set masters to the float32 weights that the model's weights were rounded from.

        A master that starts exactly at its rounded value must move by half a rounding step before the model changes; masters
        that start anywhere in between change the model, on average, by as much as they move.

        Args:
            exact: by name; values that do not round to the model's weight are ignored with a warning.
        """
        rounded = {id(master): parameter for parameter, master in self._copies}
        with torch.no_grad():
            for name, master in self.parameters.items():
                if id(master) not in rounded or name not in exact:
                    continue
                value = exact[name].to(master.device)
                if torch.equal(value.to(rounded[id(master)].dtype), rounded[id(master)]):
                    master.copy_(value)
                else:
                    _log.warning(
                        "%s differs from its float32 value in the checkpoint, so its master starts at the rounded weight", name
                    )

    def move(self, device: torch.device, memory: HostMemory) -> None:
        """Move the copies to `device`; the model's own parameters move with the model."""
        for number, (_, master) in enumerate(self._copies):
            master.data = memory.move(("master", number), master.data, device)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Name to gradient, for parameters that have one."""
        return {name: master.grad for name, master in self.parameters.items() if master.grad is not None}

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for master in self.parameters.values():
            master.grad = None
        for parameter, _ in self._copies:
            parameter.grad = None


class _AccumulateInto:
    """Hook that adds a parameter's new gradient to its master's and frees it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self._master.grad is None:
            self._master.grad = gradient.float()
        else:
            self._master.grad.add_(gradient)


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
