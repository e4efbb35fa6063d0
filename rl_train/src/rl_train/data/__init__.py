"""Datasets, their sources and the order in which rows are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_train.data.dataloader import BatchedDataLoader as BatchedDataLoader
    from rl_train.data.datasets import RecordDataset as RecordDataset
    from rl_train.data.messages import DatumSpec as DatumSpec

__all__ = ["BatchedDataLoader", "DatumSpec", "RecordDataset"]

__getattr__ = import_on_first_use(__name__)
