"""Converts attention masks to lengths."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError


def lengths_from_attention_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number of tokens of each row, [B] int64, from a mask [B, T] with 1 on tokens and 0 on padding.

    Raises:
        DataError: A row is padded on the left or has gaps, or an entry is neither 0 nor 1.
    """
    if attention_mask.ndim != 2:
        raise DataError(f"attention_mask has shape {list(attention_mask.shape)}: expected [B, T]")
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise DataError("attention_mask has values other than 0 and 1: use 1 on tokens and 0 on padding")
    mask = attention_mask.to(torch.int64)
    lengths = mask.sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths.unsqueeze(1)
    wrong = (mask.bool() != expected).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"attention_mask of row {row} is {_brief(mask[row])}: tokens must come first, followed by padding, without gaps "
            "(set padding_side='right' in the tokenizer)"
        )
    return lengths


def with_input_lengths(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The batch with `input_lengths` [B] instead of an `attention_mask` [B, T]; the same batch if it has no mask.

    This is the only conversion of masks: everything behind the policy and generation interfaces reads lengths.

    Raises:
        DataError: The batch has neither of them, the mask is not right-padded, or the two contradict each other.
    """
    if "attention_mask" not in data:
        if "input_lengths" not in data:
            raise DataError(f"a batch for a model needs input_lengths [B] (or attention_mask [B, T]): found {sorted(data)}")
        return data
    lengths = lengths_from_attention_mask(data["attention_mask"])
    if "input_lengths" in data and not torch.equal(lengths, data["input_lengths"].to(lengths)):
        raise DataError(
            f"input_lengths is {_brief(data['input_lengths'])}, but attention_mask counts {_brief(lengths)}: pass only one"
        )
    accepted = data.copy()
    del accepted["attention_mask"]
    accepted["input_lengths"] = lengths
    return accepted


def _brief(values: torch.Tensor) -> str:
    listed = values.tolist()
    return str(listed) if len(listed) <= 16 else f"{listed[:16]}..."
