"""Loads a folder of Megatron's distributed checkpoint as data: nothing that it contains is run.

Megatron reads `.metadata` with pickle, `common.pt` by torch's default and entries of bytes without restriction. Its strategies
make the reader and the planner themselves, from two names of their module, so those are exchanged for as long as one loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint.metadata import Metadata

from rl_core.errors import CheckpointError
from rl_core.training.data_only import DataOnlyBytes, DataOnlyReader, read_metadata


def load_as_data(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `dist_checkpointing.load` returns; collective.

    Args:
        requested: the sharded state to fill.
        folder: what `dist_checkpointing.save` wrote, in the format torch_dist.

    Raises:
        CheckpointError: a file would have run code, or is damaged.
    """
    # Inside Megatron the error would be one of several ranks' tracebacks.
    read_metadata(folder)
    with _data_only_strategies():
        found: dict[str, Any] = dist_checkpointing.load(
            requested,
            str(folder),
            sharded_strategy=strategies.TorchDistLoadShardedStrategy(),
            common_strategy=_DataOnlyCommonStrategy(),
        )
    return found


class _DataOnlyCommonStrategy(TorchCommonLoadStrategy):
    def load_common(self, checkpoint_dir: str | Path) -> Any:
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist, so there is no training state to continue from.") from error
        except Exception as error:
            raise CheckpointError(f"{path} was not loaded: {type(error).__name__}: {error}. Use another checkpoint.") from error


class _CachingReader(DataOnlyReader):
    """Megatron asks twice for the metadata of one load."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._found: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._found is None:
            self._found = super().read_metadata()
        return self._found


class _DataOnlyPlanner(DataOnlyBytes, strategies.MCoreLoadPlanner):
    """Megatron's planner, which loads entries of bytes as data."""


@contextmanager
def _data_only_strategies() -> Iterator[None]:
    before = strategies._get_filesystem_reader, strategies.MCoreLoadPlanner
    strategies._get_filesystem_reader = lambda folder, cache_metadata=False: _CachingReader(folder)
    strategies.MCoreLoadPlanner = _DataOnlyPlanner
    try:
        yield
    finally:
        strategies._get_filesystem_reader, strategies.MCoreLoadPlanner = before
