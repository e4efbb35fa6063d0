"""Writes and reads what training goes on from: optimizer, masters, schedule, random state; knows no model's forward pass.

Tensors are kept whole, by parameter name, through torch.distributed.checkpoint, so that another number of ranks, or another way
of sharing them, reads its own part. Beside them: `trainer.pt` (from rank 0) and `rng-<rank>.pt`.
"""

from __future__ import annotations

import logging
import pickle
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate

from rl_backends_hf.master_weights import MasterWeights
from rl_core.errors import CheckpointError, CheckpointWriteError
from rl_core.training.data_only import DataOnlyPlanner, DataOnlyReader, read_metadata
from rl_core.training.finite import first_non_finite
from rl_core.training.optimizer_settings import OptimizerSettings

_FORMAT: Final = 2
_DAMAGE: Final = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)
"""What torch raises for damaged files."""
_log = logging.getLogger(__name__)

# One rank has no process group on purpose; PyTorch says so at each save and load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(kw_only=True)
class TrainingState:
    """What steps, and what it steps on."""

    masters: MasterWeights
    settings: OptimizerSettings
    weight_version: int = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Steps on the masters."""
        return self.settings.optimizer

    @property
    def scheduler(self) -> Any:
        """Steps once an optimizer step."""
        return self.settings.scheduler

    def save(self, folder: Path, *, rank: int, world_size: int) -> None:
        """Write this rank's part into `folder`; collective."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors, scalars = self._split_state()
        try:
            save(tensors or {"empty": torch.zeros(1)}, checkpoint_id=folder, no_dist=world_size == 1)
        except CheckpointException as error:  # no `Exception`, and its text leaves the reason out
            raise _write_error(folder, error) from error
        torch.save(_random_state(), folder / _rng_file(rank))
        if rank == 0:
            trainer = {
                "format": _FORMAT,
                "world_size": world_size,
                "weight_version": self.weight_version,
                "scalars": scalars,
                **self.settings.state_dict(),
            }
            torch.save(trainer, folder / "trainer.pt")

    def load(self, folder: Path, *, rank: int, world_size: int) -> None:
        """Continue from what `save` wrote, by any number of ranks; nothing in the folder is run.

        Random state is restored if this rank had one; with more ranks than before, the further ones keep theirs.

        Raises:
            CheckpointError: the folder is absent, damaged, or of another model or optimizer.
        """
        try:
            self._load(folder, rank=rank, world_size=world_size)
        except _DAMAGE as error:
            raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}") from error

    def _load(self, folder: Path, *, rank: int, world_size: int) -> None:
        trainer = _read(folder / "trainer.pt")
        if trainer.get("format") != _FORMAT:
            raise CheckpointError(
                f"{folder} was written in format {trainer.get('format')}; this version reads format {_FORMAT}."
            )
        self.settings.load_state_dict(trainer, steps=trainer["weight_version"], source=str(folder))
        state = self._load_tensors(folder, no_dist=world_size == 1)
        for name, values in trainer["scalars"].items():
            state.setdefault(name, {}).update(values)
        self._take(state, folder)
        self.weight_version = trainer["weight_version"]
        if (folder / _rng_file(rank)).is_file():
            _restore_random_state(_read(folder / _rng_file(rank)))
        elif rank < trainer["world_size"]:
            raise CheckpointError(
                f"{folder} is damaged: {_rng_file(rank)} is missing, though {trainer['world_size']} ranks wrote it."
            )

    def find_non_finite(self) -> str | None:
        """The name of the first tensor of this rank's part that has NaN or infinities, or None."""
        return first_non_finite(self._split_state()[0].items())

    def move(self, device: torch.device) -> None:
        """Bring optimizer state and float32 copies to `device`."""
        for values in self.optimizer.state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and (value.ndim > 0 or self._counts_on_device):
                    values[key] = value.to(device)
        self.masters.move(device)

    @property
    def _counts_on_device(self) -> bool:
        """Whether the optimizer keeps its counts of steps beside the parameters: Adam does so where it is fused."""
        return any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)

    def _split_state(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in self.masters.parameters.items():
            if self.masters.are_rounded:
                tensors[f"master.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value
                else:
                    scalars.setdefault(name, {})[key] = value
        return tensors, scalars

    def _load_tensors(self, folder: Path, *, no_dist: bool) -> dict[str, dict[str, Any]]:
        """Fill the masters; return the optimizer's tensors by parameter name."""
        stored = read_metadata(folder).state_dict_metadata
        wanted: dict[str, torch.Tensor] = {}
        state: dict[str, dict[str, Any]] = {}
        for key, metadata in stored.items():
            if not isinstance(metadata, TensorStorageMetadata):
                raise CheckpointError(f"{folder} is damaged: its entry {key} is not a tensor.")
            if key == "empty":
                continue
            kind, _, rest = key.partition(".")
            name, entry = (rest, "") if kind == "master" else rest.rpartition(".")[::2]
            parameter = self.masters.parameters.get(name)
            if parameter is None:
                raise CheckpointError(f"{folder} is of another model: it has state of {name}, which this model lacks.")
            if kind == "master":
                wanted[key] = parameter.detach()
                _check_shape(name, metadata.size, parameter.shape, folder)
            else:
                wanted[key] = _room_for(metadata, parameter, counts_on_device=self._counts_on_device)
                state.setdefault(name, {})[entry] = wanted[key]
        try:
            load(wanted, storage_reader=DataOnlyReader(folder), planner=DataOnlyPlanner(), no_dist=no_dist)
        except (CheckpointException, *_DAMAGE) as error:
            raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
        return state

    def _take(self, state: Mapping[str, dict[str, Any]], folder: Path) -> None:
        if state and (missing := self.masters.parameters.keys() - state.keys()):
            raise CheckpointError(f"{folder} is of another model: it has no optimizer state of {sorted(missing)[0]}.")
        self.optimizer.state.clear()
        for name, values in state.items():
            self.optimizer.state[self.masters.parameters[name]] = values
        self.masters.copy_to_model()


def _write_error(folder: Path, error: CheckpointException) -> CheckpointWriteError:
    reasons = [f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()]
    return CheckpointWriteError(f"The training state could not be written to {folder}: {'; '.join(reasons)}")


def _room_for(metadata: TensorStorageMetadata, parameter: nn.Parameter, *, counts_on_device: bool) -> torch.Tensor:
    """An empty tensor of the stored shape, sharded as its parameter is; a count of steps lies where the optimizer reads it."""
    dtype = metadata.properties.dtype
    if tuple(metadata.size) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = counts_on_device or len(metadata.size) > 0
    room = torch.empty(metadata.size, dtype=dtype, device=parameter.device if on_device else "cpu")
    if isinstance(parameter, DTensor) and len(metadata.size):
        return DTensor.from_local(room, parameter.device_mesh, [Replicate()])
    return room


def _check_shape(name: str, found: Any, wanted: Any, folder: Path) -> None:
    if tuple(found) != tuple(wanted):
        raise CheckpointError(f"{folder} is of another model: {name} is {tuple(found)} there and {tuple(wanted)} here.")


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


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, so there is no training state to go on from.") from error
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds {type(found).__name__}.")
    values: dict[str, Any] = found
    return values
