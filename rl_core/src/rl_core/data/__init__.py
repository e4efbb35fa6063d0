"""Rows, messages, packing and the order in which data is seen; knows no model and no cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict as BatchedDataDict
    from rl_core.data.dataloader import BatchedDataLoader as BatchedDataLoader
    from rl_core.data.datasets import RecordDataset as RecordDataset
    from rl_core.data.messages import DatumSpec as DatumSpec
    from rl_core.data.tokenizer import load_tokenizer as load_tokenizer

_HOMES = {
    "BatchedDataDict": "batched_data_dict",
    "BatchedDataLoader": "dataloader",
    "DatumSpec": "messages",
    "RecordDataset": "datasets",
    "load_tokenizer": "tokenizer",
}
__all__ = ["BatchedDataDict", "BatchedDataLoader", "DatumSpec", "RecordDataset", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    """Import on first use: `dataset_config` in this package is read where torch must not be loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
