"""Writes and reads what training goes on from: optimizer, float32 weights, schedule; knows no forward pass.

Tensors go through Megatron's distributed checkpoint (format torch_dist), each rank its part, under names of the whole model: so
any other division over ranks reads its own part. Beside them `trainer.pt`, from rank 0.
"""

from __future__ import annotations

import pickle
import queue
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.data_only import load_as_data
from rl_backends_megatron.optimizer import TrainableModel
from rl_backends_megatron.optimizer_state import init_state, match_layout, patched_state_io, separate_step_counters
from rl_backends_megatron.parallel import Ranks
from rl_core.errors import CheckpointError, CheckpointWriteError

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
"""What torch and Megatron raise for damaged files."""


def save(trainable: TrainableModel, folder: Path, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Write this rank's part into `folder`; collective.

    Args:
        trainable: what steps.
        folder: made where it is not there.
        ranks: the ranks.
        facts: of the configuration, which a resume must share.
    """
    tensors = folder / "tensors"
    if ranks.rank == 0:
        tensors.mkdir(parents=True, exist_ok=True)
        for old in tensors.iterdir():
            old.unlink()
    torch.distributed.barrier()
    # Otherwise the writer starts a process of its own for one queue, which imports the main module anew: seconds, and a
    # deadlock where that is an unguarded script.
    filesystem_async._results_queue = queue.Queue()
    for part in trainable.sub_optimizers:
        if not part.state:
            init_state(part)
    with cpu_shim(), patched_state_io(trainable.sub_optimizers):
        try:
            dist_checkpointing.save(_sharded(trainable, loading=False), str(tensors))
        except CheckpointException as error:  # no `Exception`, and its text leaves the reason out
            reasons = [f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()]
            raise CheckpointWriteError(f"The training state could not be written to {tensors}: {'; '.join(reasons)}") from error
    if ranks.rank == 0:
        values = {
            "format": _FORMAT,
            "weight_version": trainable.weight_version,
            "schedule": trainable.schedule_state(),
            "facts": facts,
        }
        torch.save(values, folder / "trainer.pt")


def load(trainable: TrainableModel, folder: Path, facts: dict[str, Any]) -> None:
    """Continue from what `save` wrote, by any number and arrangement of ranks; nothing in the folder is run; collective.

    Raises:
        CheckpointError: the folder is absent, damaged, or of another configuration.
    """
    values = _read(folder / "trainer.pt")
    if values.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} was written by another format ({values.get('format')}; this is {_FORMAT}).")
    if missing := {"weight_version", "schedule", "facts"} - values.keys():
        raise CheckpointError(f"{folder / 'trainer.pt'} is damaged: it has no `{min(missing)}`.")
    for name, now in facts.items():
        then = values["facts"].get(name)
        if then != now:
            raise CheckpointError(
                f"{folder} was written with {name} = {then!r}, and this policy has {now!r}; their state is kept in different "
                "forms. Resume under the config that wrote it; the division over ranks may change."
            )
    for part in trainable.sub_optimizers:
        init_state(part)
    try:
        with cpu_shim(), patched_state_io(trainable.sub_optimizers):
            asked = _sharded(trainable, loading=True)
            found = load_as_data(asked, folder / "tensors")["optimizer"]
            trainable.optimizer.load_state_dict(match_layout(asked["optimizer"], found, steps=values["weight_version"]))
    except (CheckpointingException, CheckpointException, *_DAMAGE) as error:
        raise CheckpointError(f"{folder} is damaged, or of another model: {type(error).__name__}: {error}") from error
    for part in trainable.sub_optimizers:
        separate_step_counters(part)
    trainable.load_schedule_state(values["schedule"], steps=values["weight_version"], source=str(folder))
    trainable.weight_version = values["weight_version"]


def _sharded(trainable: TrainableModel, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    weights = {
        f"model{number}": model.module.sharded_state_dict(metadata=metadata) for number, model in enumerate(trainable.models)
    }
    if len(weights) == 1:
        weights = weights["model0"]
    state = trainable.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"optimizer": state}


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
