"""The training state: steps of the optimizer, and its state, float32 master weights, schedule and random state in a checkpoint.

Tensors are saved whole, by parameter name, with torch.distributed.checkpoint, so any number of ranks and any sharding can load
its own shards; quantized optimizer state is saved by shard (see `optimizer.py`). `trainer.pt` (written by rank 0) and
`rng-<rank>.pt` are next to them.
"""

from __future__ import annotations

import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate

from rl_backends_base.data_only import (
    DAMAGE_ERRORS,
    TRAINER_FILE,
    DataOnlyBytes,
    DataOnlyReader,
    read_metadata,
    read_state_file,
    read_trainer_file,
    reason_of,
    write_error,
)
from rl_backends_base.host_memory import HostMemory
from rl_backends_base.optimizer import (
    MasterWeights,
    OptimizerChain,
    check_stored,
    create_state,
    has_state,
    is_quantized,
    plain_tensors,
    shard_tensors,
)
from rl_backends_base.optimizer_settings import OptimizerSettings, parts_of
from rl_backends_base.parallel import Parallel, clip_
from rl_backends_base.shards import local
from rl_core.backend import first_non_finite
from rl_core.errors import CheckpointError, NotSupportedError

_FORMAT: Final = 2
_AVERAGE: Final = "average."

# A single rank has no process group on purpose; PyTorch warns about it at each save and load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DataOnlyPlanner(DataOnlyBytes, DefaultLoadPlanner):
    """Torch's planner, loading byte entries as data."""


class TrainingStateBase(ABC):
    """Weights and the optimizer that updates them, on one rank. All methods are called on all ranks together.

    `TrainingState` has an optimizer of torch; a backend whose library has its own optimizer derives from this class.
    """

    weight_version: int = 0
    """Number of optimizer steps taken."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Discard all gradients."""

    @abstractmethod
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """This rank's gradients, or shards of them, by name."""

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Sum the gradients over the ranks; scalar, the 2-norm of the full gradient."""

    @abstractmethod
    def step(self, norm: torch.Tensor, max_norm: float | None) -> float:
        """Clip the gradients, and step optimizer and schedule.

        Args:
            norm: result of `gradient_norm`.
            max_norm: maximum gradient norm; None disables clipping.

        Returns:
            The learning rate of the step; the highest if there are several.
        """

    def set_lr_factor(self, factor: float) -> None:
        """See `TrainableInterface.set_lr_factor`. By default, not supported."""
        raise NotSupportedError(f"{type(self).__name__} does not implement `set_lr_factor`.")

    def group_lrs(self) -> dict[str, float]:
        """Learning rates of the next step by optimizer group; by default, there are no groups."""
        return {}

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write this rank's shards of optimizer state, float32 weights and schedule into `folder`."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote with any number of ranks; nothing in the folder is executed.

        Raises:
            CheckpointError: the folder is missing, damaged, or of another model or optimizer.
        """

    @abstractmethod
    def tensors_by_kind(self) -> dict[str, Iterable[torch.Tensor]]:
        """This rank's tensors other than the model's, for the error of full memory."""

    def weights_loaded(self) -> None:
        """Called after the weights of the model were loaded. By default, nothing."""
        return None

    @abstractmethod
    def find_non_finite(self) -> str | None:
        """The name of the first of this rank's tensors that has NaN or infinities, or None."""


@dataclass(kw_only=True)
class TrainingState(TrainingStateBase):
    """The optimizer of one rank, its schedule, and the weights that it updates.

    Attributes:
        masters: the weights.
        settings: the optimizer and its schedule.
        parallel: the ranks.
        weight_version: number of optimizer steps taken.
        average: moving average of the weights, float32, by name; empty until it is first used.
    """

    masters: MasterWeights
    settings: OptimizerSettings
    parallel: Parallel
    weight_version: int = 0
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    _exchanged: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Updates the master weights."""
        return self.settings.optimizer

    @property
    def scheduler(self) -> Any:
        """Learning-rate schedule; it steps once per optimizer step."""
        return self.settings.scheduler

    @property
    def _shard(self) -> tuple[int, int]:
        """Which shard of the trained weights this rank has, from 0, and how many there are."""
        if not any(isinstance(parameter, DTensor) for parameter in self.masters.parameters.values()):
            return 0, 1
        return self.parallel.rank % self.parallel.num_shards, self.parallel.num_shards

    def clear_gradients(self) -> None:
        self.masters.clear_gradients()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return self.masters.gradients()

    def gradient_norm(self) -> torch.Tensor:
        self.parallel.sum_gradients(self.masters.parameters)
        return self.parallel.gradient_norm(list(self.gradients().values()))

    def step(self, norm: torch.Tensor, max_norm: float | None) -> float:
        if max_norm is not None:
            clip_(list(self.gradients().values()), norm, max_norm)
        with self.settings.scaled_lr() as lr:
            self.optimizer.step()
        # Fused optimizers change parameters without counting it, but an engine that shares them checks the counts.
        increment_version(list(self.masters.parameters.values()))
        self.scheduler.step()
        self.masters.copy_to_model()
        self.clear_gradients()
        self.weight_version += 1
        return lr

    def _start_average(self) -> None:
        if not self.average:
            self.average = {name: master.detach().clone() for name, master in self.masters.parameters.items()}

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """Average <- decay * average + (1 - decay) * weights; it starts with the weights at its first use."""
        self._start_average()
        for name, master in self.masters.parameters.items():
            local(self.average[name]).lerp_(local(master), 1.0 - decay)

    @torch.no_grad()
    def exchange_average(self, module: nn.Module) -> None:
        """Give the module of the weights those of the average, or at every second call its own again, with the same bits.

        Written through `data`: an engine that shares the tensors counts changes, and this is none when it samples.
        """
        self._start_average()
        parameters = {name: local(each) for name, each in module.named_parameters() if name in self.average}
        values, self._exchanged = self._exchanged, {}
        if not values:
            values = {name: local(each) for name, each in self.average.items()}
            self._exchanged = {name: each.to("cpu", copy=True) for name, each in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data.copy_(values[name])

    def set_lr_factor(self, factor: float) -> None:
        self.settings.lr_factor = factor

    def group_lrs(self) -> dict[str, float]:
        lrs = self.optimizer.learning_rates() if isinstance(self.optimizer, OptimizerChain) else {}
        return {name: lr * self.settings.lr_factor for name, lr in lrs.items()}

    def save(self, folder: Path) -> None:
        rank, world_size = self.parallel.rank, self.parallel.world_size
        folder.mkdir(parents=True, exist_ok=True)
        tensors, scalars = self._split_state()
        try:
            save(tensors or {"empty": torch.zeros(1)}, checkpoint_id=folder, no_dist=world_size == 1)
        except CheckpointException as error:  # derives from BaseException
            raise write_error(folder, error) from error
        torch.save(_random_state(), folder / _rng_file(rank))
        if rank == 0:
            trainer = {
                "format": _FORMAT,
                "world_size": world_size,
                "weight_version": self.weight_version,
                "scalars": scalars,
                **self.settings.state_dict(),
            }
            torch.save(trainer, folder / TRAINER_FILE)

    def load(self, folder: Path) -> None:
        """See the base class. Also restores the random state; with more ranks than before, additional ranks keep their own."""
        try:
            self._load(folder)
        except DAMAGE_ERRORS as error:
            raise CheckpointError(f"{folder} is damaged: {reason_of(error)}") from error

    def _load(self, folder: Path) -> None:
        rank, world_size = self.parallel.rank, self.parallel.world_size
        trainer = read_trainer_file(folder, expected_format=_FORMAT)
        self.settings.load_state_dict(trainer, steps=trainer["weight_version"], source=str(folder))
        load_tensors = self._load_quantized if is_quantized(self.optimizer) else self._load_tensors
        average = (key.partition(".")[2] for key in read_metadata(folder).state_dict_metadata if key.startswith(_AVERAGE))
        known = self.masters.parameters
        self.average = {name: torch.empty_like(known[name], requires_grad=False) for name in average if name in known}
        state = load_tensors(folder, no_dist=world_size == 1)
        for name, values in trainer["scalars"].items():
            state.setdefault(name, {}).update(values)
        self._set_state(state, folder)
        self.weight_version = trainer["weight_version"]
        if (folder / _rng_file(rank)).is_file():
            _restore_random_state(read_state_file(folder / _rng_file(rank)))
        elif rank < trainer["world_size"]:
            raise CheckpointError(
                f"{folder} is damaged: {trainer['world_size']} ranks wrote it, and {_rng_file(rank)} is missing."
            )

    def tensors(self) -> Iterator[torch.Tensor]:
        """This rank's tensors of the optimizer's state; those that a quantized tensor consists of."""
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return (part for value in values if isinstance(value, torch.Tensor) for part in plain_tensors(value).values())

    def tensors_by_kind(self) -> dict[str, Iterable[torch.Tensor]]:
        return {
            "float32 master weights": self.masters.parameters.values(),
            "gradients": self.gradients().values(),
            "optimizer state": self.tensors(),
            **({"moving average": self.average.values()} if self.average else {}),
        }

    def weights_loaded(self) -> None:
        self.masters.copy_from_model()

    def find_non_finite(self) -> str | None:
        return first_non_finite(self._split_state()[0].items())

    def move(self, device: torch.device, memory: HostMemory) -> None:
        """Move the optimizer state and the float32 copies of weights to `device`."""
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and (value.ndim > 0 or self._keeps_step_counts_on_device):
                    values[key] = memory.move((id(parameter), key), value, device)
        self.masters.move(device, memory)
        self.average = {name: memory.move(("average", name), each, device) for name, each in self.average.items()}

    @property
    def _keeps_step_counts_on_device(self) -> bool:
        """Whether the optimizer keeps its step counts on the device of the parameters, as fused Adam does."""
        return any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)

    def _split_state(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in self.masters.parameters.items():
            if self.masters.are_rounded:
                tensors[f"master.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    scalars.setdefault(name, {})[key] = value
                elif not is_quantized(self.optimizer):
                    tensors[f"optimizer.{name}.{key}"] = value
        tensors |= {f"{_AVERAGE}{name}": average for name, average in self.average.items()}
        if is_quantized(self.optimizer):
            tensors |= shard_tensors(self.optimizer, self.masters.parameters, shard=self._shard)
        return tensors, scalars

    def _load_tensors(self, folder: Path, *, no_dist: bool) -> dict[str, dict[str, Any]]:
        """Load the master weights in place; return the optimizer's tensors by parameter name."""
        stored = read_metadata(folder).state_dict_metadata
        targets: dict[str, torch.Tensor] = {}
        state: dict[str, dict[str, Any]] = {}
        for key, metadata in stored.items():
            if not isinstance(metadata, TensorStorageMetadata):
                raise CheckpointError(f"{folder} is damaged: its entry {key} is not a tensor. Use another checkpoint.")
            if key == "empty":
                continue
            kind, _, rest = key.partition(".")
            name, entry = (rest, "") if kind in ("master", "average") else rest.rpartition(".")[::2]
            parameter = self.masters.parameters.get(name)
            if parameter is None:
                raise CheckpointError(f"{folder} is of another model: it has state of {name}, which this model does not have.")
            if kind in ("master", "average"):
                targets[key] = parameter.detach() if kind == "master" else self.average[name]
                _check_shape(name, metadata.size, parameter.shape, folder)
            else:
                on_device = self._keeps_step_counts_on_device
                targets[key] = _empty_like_stored(metadata, parameter, counts_on_device=on_device)
                state.setdefault(name, {})[entry] = targets[key]
        _load_into(targets, folder, no_dist=no_dist)
        return state

    def _load_quantized(self, folder: Path, *, no_dist: bool) -> dict[str, dict[str, Any]]:
        """Load the master weights and the optimizer's tensors in place; return the latter by parameter name."""
        stored = read_metadata(folder).state_dict_metadata
        self.optimizer.state.clear()
        if has_state(stored):
            create_state(self.optimizer, self.masters.parameters.values())
        targets = self._split_state()[0]
        check_stored(targets, stored, folder, shards=self._shard[1])
        _load_into(targets or {"empty": torch.zeros(1)}, folder, no_dist=no_dist)
        state = {name: dict(self.optimizer.state[parameter]) for name, parameter in self.masters.parameters.items()}
        return {name: values for name, values in state.items() if values}

    def _set_state(self, state: Mapping[str, dict[str, Any]], folder: Path) -> None:
        names = {parameter: name for name, parameter in self.masters.parameters.items()}
        for part in parts_of(self.optimizer):  # some optimizers have no state
            members = {names[parameter] for group in part.param_groups for parameter in group["params"]}
            if members & state.keys() and (missing := members - state.keys()):
                raise CheckpointError(f"{folder} is of another model: it has no optimizer state for {min(missing)}.")
        self.optimizer.state.clear()
        for name, values in state.items():
            self.optimizer.state[self.masters.parameters[name]] = values
        self.masters.copy_to_model()


def _load_into(targets: dict[str, torch.Tensor], folder: Path, *, no_dist: bool) -> None:
    try:
        load(targets, storage_reader=DataOnlyReader(folder), planner=DataOnlyPlanner(), no_dist=no_dist)
    except (CheckpointException, *DAMAGE_ERRORS) as error:
        raise CheckpointError(f"{folder} is damaged: {reason_of(error)}") from error


def _empty_like_stored(metadata: TensorStorageMetadata, parameter: nn.Parameter, *, counts_on_device: bool) -> torch.Tensor:
    """An empty tensor of the stored shape, sharded like its parameter.

    Args:
        metadata: of the stored tensor.
        parameter: the parameter that the state belongs to.
        counts_on_device: whether step counts, which are scalars, are kept on the device of the parameter.
    """
    dtype = metadata.properties.dtype
    if tuple(metadata.size) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = counts_on_device or len(metadata.size) > 0
    empty = torch.empty(metadata.size, dtype=dtype, device=parameter.device if on_device else "cpu")
    if isinstance(parameter, DTensor) and len(metadata.size):
        return DTensor.from_local(empty, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return empty


def _check_shape(name: str, value: Any, expected: Any, folder: Path) -> None:
    if tuple(value) != tuple(expected):
        raise CheckpointError(
            f"{folder} is of another model: {name} has shape {tuple(value)}, not {tuple(expected)}. Resume with the "
            "`policy.model_name` that it was written with.",
            key="policy.model_name",
        )


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
