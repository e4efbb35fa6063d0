"""Rows for the workers of a policy or an engine: the columns that they read, padding rows, and the counts of a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import refuse_text, with_input_lengths
from rl_core.errors import BrokenPromiseError, DataError
from rl_core.interfaces.worker import GlobalCounts

ROW_KEYS = (
    *("input_ids", "input_lengths", "stop_strings", "sample_seeds", "max_new_tokens", "session_ids", "prompt_id", "sampling"),
    *("stream_tokens", "images"),
)
PADDING_PROMPT = -1
"""`prompt_id` of padding rows."""


def select_columns(data: BatchedDataDict[Any], keys: Collection[str]) -> BatchedDataDict[Any]:
    """Only the columns that the ranks need.

    An `attention_mask` is converted to `input_lengths`. The output of an engine is accepted as rows: `output_ids` and
    `unpadded_sequence_lengths` become `input_ids` and `input_lengths`.

    Raises:
        DataError: a column is missing, or an `attention_mask` is not right-padded or contradicts `input_lengths`.
    """
    refuse_text(data)
    columns = dict(data.data if isinstance(data, BatchedDataDict) else data)
    if "input_ids" in keys and "input_ids" not in columns and "output_ids" in columns:
        columns["input_ids"] = columns["output_ids"]
        columns.setdefault("input_lengths", columns["unpadded_sequence_lengths"])
    elif "input_lengths" in keys and "attention_mask" in columns:
        columns = dict(with_input_lengths(BatchedDataDict(columns)))
    if missing := [key for key in keys if key not in columns]:
        raise DataError(
            f"The batch has no {', '.join(f'`{key}`' for key in missing)}; it has {', '.join(sorted(map(str, columns)))}. "
            "See docs/batch_keys.md for each key's content and writer."
        )
    return BatchedDataDict({key: columns[key] for key in keys})


def check_rows(answer: Any, key: str, rows: int) -> None:
    """Refuse a worker's answer that cannot be put in the order of the call: one without `rows` rows of the column `key`."""
    column = answer.get(key) if isinstance(answer, Mapping) else None
    if not isinstance(column, torch.Tensor):
        found = "no column" if column is None else f"a {type(column).__name__} as"
        raise BrokenPromiseError(f"returned {found} `{key}`. It must be a tensor.")
    if len(column) != rows:
        raise BrokenPromiseError(f"returned {len(column)} rows of `{key}` for a call with {rows} rows.")


def pad_rows_to_multiple(rows: BatchedDataDict[Any], multiple: int) -> BatchedDataDict[Any]:
    """`rows`, padded with copies of the first row to a multiple of `multiple` rows.

    A padding row has one token and is masked out (`sample_mask` and `token_mask` are 0), so no mean depends on it.
    """
    missing = -rows.size % multiple
    if missing == 0:
        return rows
    return BatchedDataDict.from_batches([rows, padding_rows(rows, 0, missing)])


def padding_rows(rows: BatchedDataDict[Any], row: int, count: int) -> BatchedDataDict[Any]:
    """`count` copies of row `row`, cut to one token and masked out, so that they have no effect on training."""
    filler = rows.slice(row, row + 1).repeat_interleave(count)
    filler["input_lengths"] = torch.ones_like(filler["input_lengths"])
    for mask in ("token_mask", "sample_mask"):
        if mask in filler:
            filler[mask] = torch.zeros_like(filler[mask])
    if "prompt_id" in filler:
        filler["prompt_id"] = torch.full_like(filler["prompt_id"], PADDING_PROMPT)
    if "images" in filler:
        filler["images"] = [None] * count
    return filler


def global_counts(rows: BatchedDataDict[Any], batch_size: int) -> list[GlobalCounts]:
    """Number of trained sequences and tokens in each global batch of `batch_size` rows."""
    seqs = (rows["sample_mask"] > 0).double()
    toks = ((rows["token_mask"] > 0) & (rows["sample_mask"] > 0).unsqueeze(-1)).sum(dim=-1).double()
    return [
        GlobalCounts(valid_seqs=float(s.sum()), valid_toks=float(t.sum()))
        for s, t in zip(seqs.split(batch_size), toks.split(batch_size), strict=True)
    ]
