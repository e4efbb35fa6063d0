"""Batches, chat templates, packing and tokenizers: the data that policies, engines and environments exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict as BatchedDataDict
    from rl_core.data.tokenizer import load_tokenizer as load_tokenizer

__all__ = ["BatchedDataDict", "load_tokenizer"]

__getattr__ = import_on_first_use(__name__)
