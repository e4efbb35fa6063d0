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

Muon (https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by one with the same singular vectors and
singular values near 1, so it needs whole matrices: see `GatheredMuon`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_backends_base.host_memory import HostMemory
from rl_backends_base.optimizer_settings import call_named
from rl_backends_base.shards import fill, has_parts, local, whole
from rl_core.config.policy_sections import REST
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import CheckpointError, UserError, with_key
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.import_path import resolve

_log = logging.getLogger(__name__)

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""Extra keyword in `optimizer.kwargs`: if true, biases and norms (all one-dimensional tensors) have no weight decay."""


_OF_A_LAYER: Final = re.compile(r".*\.\d+\..*weight")
"""Name of a weight in a list of layers. Adapters have such names too."""
_NAMED: Final = 4
"""Most parameters that an error names."""


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; an `OptimizerChain` if the config has groups.

    torch's Adam and AdamW use their fused implementation (one pass over memory) unless `kwargs` specify otherwise.

    Args:
        parameters: name to parameter.
        config: import path, keyword arguments and groups.

    Raises:
        UserError: the import path does not exist, the optimizer rejects the arguments or the parameters, its steps cannot be
            compiled, or as `parameters_by_group`.
    """
    if not config.groups:
        return _build(parameters, config, key="policy.optimizer")
    parts = {}
    for name, members in parameters_by_group(parameters, config).items():
        own, key = (config, "policy.optimizer") if name == REST else (config.of_group(name), f"policy.optimizer.groups.{name}")
        parts[name] = _build(members, own, key=key)
        if is_quantized(parts[name]):
            raise UserError(
                f"`{key}.name`: quantized optimizer state ({own.name}) cannot be combined with `policy.optimizer.groups`.",
                key=f"{key}.name",
            )
        _log.info("Optimizer group %s: %s with %d tensors", name, own.name, len(members))
    return OptimizerChain(*parts.values(), names=tuple(parts))


def parameters_by_group(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each of `config.groups`, in the order of their names, then `REST`: those of no group, if there are any.

    Args:
        parameters: name to parameter.
        config: with groups.

    Raises:
        UserError: a pattern matches nothing, or two groups have the same parameter.
    """
    owners: dict[str, str] = {}
    for group, section in sorted(config.groups.items()):
        for pattern in [section.params] if isinstance(section.params, str) else section.params or ():
            key = f"policy.optimizer.groups.{group}.params"
            matches = [name for name in parameters if fnmatchcase(name, pattern)]
            if not matches:
                is_part = any(pattern in name for name in parameters)
                meant = f" Did you mean '*{pattern}*'?" if is_part else did_you_mean(pattern, list(parameters))
                raise UserError(
                    f"`{key}`: {pattern!r} matches no trained parameter.{meant} Patterns match whole names, such as "
                    f"{_some(parameters)}.",
                    key=key,
                )
            if taken := [name for name in matches if owners.setdefault(name, group) != group]:
                raise UserError(
                    f"`{key}`: {pattern!r} matches {_some(taken)}, which the group {owners[taken[0]]!r} also names. A "
                    "parameter can be in one group only: make the patterns disjoint.",
                    key=key,
                )
    for group in (name for name, section in sorted(config.groups.items()) if section.params is None):
        matrices = [name for name, each in parameters.items() if name not in owners and _is_layer_matrix(name, each)]
        if not matrices:
            raise UserError(
                f"`policy.optimizer.groups.{group}`: there is no matrix of a layer that no other group has. Set `params` to "
                f"patterns of parameter names, such as {_some(parameters)}.",
                key=f"policy.optimizer.groups.{group}",
            )
        owners |= dict.fromkeys(matrices, group)
    names = [*sorted(config.groups), *([REST] if len(owners) < len(parameters) else [])]
    return {group: {name: each for name, each in parameters.items() if owners.get(name, REST) == group} for group in names}


def _is_layer_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and _OF_A_LAYER.fullmatch(name) is not None and "embed" not in name


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return ", ".join(shown[:_NAMED]) + more


def _build(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, *, key: str) -> torch.optim.Optimizer:
    """The optimizer of some parameters; `config.groups` are not read."""
    with with_key(f"{key}.name"):
        factory = resolve(config.name, key=f"{key}.name")
    kwargs = dict(config.kwargs)
    matrices_only = kwargs.pop(DECAY_MATRICES_ONLY, False)
    if factory in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & kwargs.keys():
        kwargs["fused"] = True
    if factory is torch.optim.Muon:
        _check_matrices(parameters, key=key)
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            factory = GatheredMuon
    groups: Any = list(parameters.values())
    if matrices_only:
        groups = [
            {"params": [p for p in parameters.values() if p.ndim > 1]},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    optimizer = call_named(factory, groups, kwargs, key=key, also=(DECAY_MATRICES_ONLY,))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"`{key}.name`: {config.name} returned a {type(optimizer).__name__}, which is not a torch optimizer.",
            key=f"{key}.name",
        )
    if is_quantized(optimizer):
        _check_step(optimizer, config.name)
    return optimizer


def _check_matrices(parameters: Mapping[str, nn.Parameter], *, key: str) -> None:
    others = [f"{name} {list(each.shape)}" for name, each in parameters.items() if each.ndim != 2]
    if others:
        raise UserError(
            f"`{key}`: Muon updates matrices, but these parameters do not have two axes: {_some(others)}. Leave them to "
            "another optimizer: a group of `optimizer.groups` with `name: torch.optim.Muon` and no `params` updates "
            "the matrices of layers with Muon, and all other parameters with `optimizer.name`.",
            key=key,
        )


class OptimizerChain(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, such as Muon for matrices and AdamW for the others.

    The schedule scales the learning rates of all.

    Args:
        parts: the optimizers, before their first step.
        names: their names in metrics; by default, their learning rates are not reported one by one.
    """

    def __init__(self, *parts: torch.optim.Optimizer, names: Sequence[str] = ()) -> None:
        super().__init__([parameter for part in parts for group in part.param_groups for parameter in group["params"]], {})
        self.parts, self.names = parts, names
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer."""
        for part in self.parts:
            part.step()

    def learning_rates(self) -> dict[str, float]:
        """Learning rates of the named parts."""
        return {name: float(part.param_groups[0]["lr"]) for name, part in zip(self.names, self.parts, strict=False)}


class GatheredMuon(torch.optim.Muon):
    """Muon for matrices that are sharded over ranks (FSDP2).

    The orthogonalization of a shard is not a shard of that of the matrix. Each rank gathers one matrix at a time with its
    gradient and momentum, takes the step of `torch.optim.Muon` with it, and keeps its shard. Each step thus equals that of one
    rank with the same gradient bit for bit, and takes as long. The state is sharded like the weights.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            settings = {key: group[key] for key in self.defaults}
            for shards in group["params"]:
                if "momentum_buffer" not in self.state[shards]:
                    self.state[shards]["momentum_buffer"] = torch.zeros_like(shards)
                momentum = self.state[shards]["momentum_buffer"]
                matrix = nn.Parameter(whole(shards.detach()))
                matrix.grad = whole(shards.grad)
                optimizer = torch.optim.Muon([matrix], **settings)
                optimizer.state[matrix]["momentum_buffer"] = whole(momentum)
                optimizer.step()
                fill(shards, matrix.detach())
                fill(momentum, optimizer.state[matrix]["momentum_buffer"])


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
