"""Datasets, their sources and the order in which rows are drawn."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_train.data.dataloader import BatchedDataLoader as BatchedDataLoader
    from rl_train.data.datasets import RecordDataset as RecordDataset
    from rl_train.data.messages import DatumSpec as DatumSpec

_MODULE_OF = {"BatchedDataLoader": "dataloader", "DatumSpec": "messages", "RecordDataset": "datasets"}
__all__ = ["BatchedDataLoader", "DatumSpec", "RecordDataset"]


def __getattr__(name: str) -> Any:
    """Import on first use, because `dataset_config` in this package is imported where torch must not be loaded."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
