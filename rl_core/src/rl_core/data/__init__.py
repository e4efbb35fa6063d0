"""Batches, chat templates, packing and tokenizers: the data that policies, engines and environments exchange."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict as BatchedDataDict
    from rl_core.data.tokenizer import load_tokenizer as load_tokenizer

_MODULE_OF = {"BatchedDataDict": "batched_data_dict", "load_tokenizer": "tokenizer"}
__all__ = ["BatchedDataDict", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    """Import on first use, because light modules of this package must be importable without torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
