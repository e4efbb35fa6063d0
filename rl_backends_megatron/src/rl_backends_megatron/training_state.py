"""Saves and loads the training state: optimizer state, float32 weights and schedule.

Tensors are saved with Megatron's distributed checkpoint (format torch_dist): each rank writes its shards under the names of
the whole model, so any number and arrangement of ranks can load its own shards. `trainer.pt`, written by rank 0, is next to
them.

Checkpoints are loaded as data only, without running code from them. Megatron reads `.metadata` with pickle, `common.pt` with
torch's default and byte entries without restriction. Its strategies create the reader and the planner from two names of their
module, which are replaced while loading.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from rl_backends_base import (
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
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.megatron_internals import CHECKPOINT_PLANNER, CHECKPOINT_READER, RESULTS_QUEUE
from rl_backends_megatron.model import Chunks
from rl_backends_megatron.optimizer import TrainableModel, init_state, match_layout, patched_state_io, separate_step_counters
from rl_backends_megatron.parallel import Ranks
from rl_core.errors import CheckpointError

SHARDS_OPTIMIZER: Final = "policy.megatron_cfg.use_distributed_optimizer"
_FORMAT: Final = 2
_TENSORS: Final = "tensors"


class MegatronState(TrainableModel):
    """A trainable model that saves and loads its state.

    Args:
        chunks: as in `TrainableModel`.
        config: the section `policy`.
        ranks: the ranks.
    """

    def __init__(self, chunks: Chunks, config: MegatronPolicyConfig, ranks: Ranks) -> None:
        super().__init__(chunks, config)
        self._config, self._ranks = config, ranks

    def save(self, folder: Path) -> None:
        tensors = folder / _TENSORS
        if self._ranks.rank == 0:
            tensors.mkdir(parents=True, exist_ok=True)
            for old in tensors.iterdir():
                old.unlink()
        torch.distributed.barrier()
        # Otherwise the writer starts a process for this queue, which imports the main module again, and forks others that
        # write: a lock that a thread of this process holds stays locked in them, and the writer would wait for ever.
        RESULTS_QUEUE.replace(queue.Queue())
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)
        for part in self.sub_optimizers:
            if not part.state:
                init_state(part)
        with cpu_shim(), patched_state_io(self.sub_optimizers):
            try:
                dist_checkpointing.save(self._sharded(loading=False), str(tensors))
            except CheckpointException as error:  # derives from BaseException
                raise write_error(tensors, error) from error
        if self._ranks.rank == 0:
            values = {
                "format": _FORMAT,
                "weight_version": self.weight_version,
                "schedule": self.settings.state_dict(),
                "facts": self._fixed_settings(),
            }
            torch.save(values, folder / TRAINER_FILE)

    def load(self, folder: Path) -> None:
        values = read_trainer_file(folder, expected_format=_FORMAT)
        if missing := {"weight_version", "schedule", "facts"} - values.keys():
            raise CheckpointError(f"{folder / TRAINER_FILE} is damaged: it has no `{min(missing)}`. Use another checkpoint.")
        for name, value in self._fixed_settings().items():
            saved = values["facts"].get(name)
            if saved != value:
                raise CheckpointError(
                    f"{folder} was written with {name} = {saved!r}, and this policy has {value!r}; the optimizer state has "
                    "another format with each. Resume with the config that wrote it; only the arrangement of ranks can change."
                )
        for part in self.sub_optimizers:
            init_state(part)
        try:
            with cpu_shim(), patched_state_io(self.sub_optimizers):
                target = self._sharded(loading=True)
                state = load_as_data(target, folder / _TENSORS)["optimizer"]
                self.optimizer.load_state_dict(match_layout(target["optimizer"], state, steps=values["weight_version"]))
        except (CheckpointingException, CheckpointException, *DAMAGE_ERRORS) as error:
            raise CheckpointError(f"{folder} is damaged, or of another model: {reason_of(error)}") from error
        for part in self.sub_optimizers:
            separate_step_counters(part)
        self.settings.load_state_dict(values["schedule"], steps=values["weight_version"], source=str(folder))
        self.weight_version = values["weight_version"]

    def _sharded(self, *, loading: bool) -> dict[str, Any]:
        """The optimizer state as Megatron's distributed checkpoint describes it: this rank's shards and their global names."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            # Gathered on the first data-parallel rank only. Otherwise, all of them have the whole state in memory.
            "distrib_optim_fully_reshardable_mem_efficient": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "chained_optim_avoid_prefix": True,
        }
        weights = {
            f"model{number}": each.module.sharded_state_dict(metadata=metadata) for number, each in enumerate(self.models)
        }
        if len(weights) == 1:
            weights = weights["model0"]
        return {"optimizer": self.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)}

    def _fixed_settings(self) -> dict[str, Any]:
        """Settings that determine the format of the optimizer state, so they cannot change when a run is resumed."""
        config = self._config
        return {
            "policy.precision": config.dtype_name,
            "policy.optimizer.name": config.optimizer.name,
            # Checkpoints from before there was a choice of heads do not have this key.
            **({"policy.head": "scalar"} if config.head == "scalar" else {}),
            "policy.optimizer.kwargs.decay_matrices_only": bool(config.optimizer.kwargs.get("decay_matrices_only", False)),
            SHARDS_OPTIMIZER: config.megatron_cfg.use_distributed_optimizer,
        }


def _write_here(
    transforms: Any, _use_msc: bool, _rank: int, buckets: Sequence[Any], results_queue: queue.Queue[dict[int, Any] | Exception]
) -> None:
    """Write all files of this rank, and put the results of each or the first error into the queue."""
    results: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        written, pending = queue.Queue[Any](), queue.Queue[int]()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, written, pending, True)
        _, results[number] = written.get_nowait()
        if isinstance(results[number], Exception):
            results_queue.put(results[number])
            return
    results_queue.put(results)


def saved_setting(folder: Path, name: str) -> Any:
    """A setting under which a folder was written, such as `policy.precision`; None if the folder does not have it.

    Raises:
        CheckpointError: the folder is missing or damaged.
    """
    return read_trainer_file(folder, expected_format=_FORMAT).get("facts", {}).get(name)


def load_as_data(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As `dist_checkpointing.load`; collective.

    Args:
        requested: the sharded state to fill.
        folder: written by `dist_checkpointing.save` in the format torch_dist.

    Raises:
        CheckpointError: a file would have run code, or is damaged.
    """
    # Raised inside Megatron, the error would be hidden among the tracebacks of several ranks.
    read_metadata(folder)
    with (
        CHECKPOINT_READER.replaced(lambda folder, cache_metadata=False: _CachingReader(folder)),
        CHECKPOINT_PLANNER.replaced(_DataOnlyPlanner),
    ):
        state: dict[str, Any] = dist_checkpointing.load(
            requested,
            str(folder),
            sharded_strategy=strategies.TorchDistLoadShardedStrategy(),
            common_strategy=_DataOnlyCommonStrategy(),
        )
    return state


class _DataOnlyCommonStrategy(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return read_state_file(Path(checkpoint_dir) / COMMON_STATE_FNAME)


class _CachingReader(DataOnlyReader):
    """Megatron reads the metadata twice per load."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._found: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._found is None:
            self._found = super().read_metadata()
        return self._found


class _DataOnlyPlanner(DataOnlyBytes, strategies.MCoreLoadPlanner):
    """Megatron's planner, loading byte entries as data."""
