"""Loads a Megatron distributed checkpoint as data only, without running code from it.

Megatron reads `.metadata` with pickle, `common.pt` with torch's default and byte entries without restriction. Its strategies
create the reader and the planner from two names of their module, which are replaced while loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint.metadata import Metadata

from rl_backends_megatron.megatron_internals import CHECKPOINT_PLANNER, CHECKPOINT_READER
from rl_core.backend import DataOnlyBytes, DataOnlyReader, read_metadata, reason_of
from rl_core.errors import CheckpointError


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
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist, so there is no training state to continue from.") from error
        except Exception as error:
            raise CheckpointError(f"Cannot load {path}: {reason_of(error)}. Use another checkpoint.") from error


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
