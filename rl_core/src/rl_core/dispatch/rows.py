"""What happens to rows between a caller and the ranks: checked at the door, filled up, counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import refuse_text
from rl_core.data.padding import lengths_from_attention_mask
from rl_core.errors import DataError
from rl_core.interfaces.worker import GlobalCounts


def select_columns(data: BatchedDataDict[Any], keys: Iterable[str]) -> BatchedDataDict[Any]:
    """The columns that the ranks need, and no other.

    A plain `attention_mask` becomes `input_lengths`, and what an engine returned is read as the rows that it is: `output_ids`
    and `unpadded_sequence_lengths` become `input_ids` and `input_lengths`.

    Raises:
        DataError: a column is missing.
    """
    refuse_text(data)
    wanted = list(keys)
    columns = dict(data)
    if "input_ids" in wanted and "input_ids" not in columns and "output_ids" in columns:
        columns["input_ids"] = columns["output_ids"]
        columns.setdefault("input_lengths", columns["unpadded_sequence_lengths"])
    if "input_lengths" in wanted and "input_lengths" not in columns and "attention_mask" in columns:
        columns["input_lengths"] = lengths_from_attention_mask(columns["attention_mask"])
    missing = [key for key in wanted if key not in columns]
    if missing:
        raise DataError(
            f"The batch has no {', '.join(f'`{key}`' for key in missing)}; it has {', '.join(sorted(map(str, columns)))}. "
            "docs/batch_keys.md says what each key holds and who writes it."
        )
    return BatchedDataDict({key: columns[key] for key in wanted})


def pad_rows_to_multiple(rows: BatchedDataDict[Any], multiple: int) -> BatchedDataDict[Any]:
    """`rows` with copies of the first row behind them, so that their number is a multiple of `multiple`.

    A filler row is one token long and masked out (`sample_mask` and `token_mask` 0), so it weighs nothing in any mean.
    """
    missing = -rows.size % multiple
    if missing == 0:
        return rows
    filler = rows.slice(0, 1).repeat_interleave(missing)
    filler["input_lengths"] = torch.ones_like(filler["input_lengths"])
    for mask in ("token_mask", "sample_mask"):
        if mask in filler:
            filler[mask] = torch.zeros_like(filler[mask])
    return BatchedDataDict.from_batches([rows, filler])


def global_counts(rows: BatchedDataDict[Any], batch_size: int) -> list[GlobalCounts]:
    """Trained sequences and tokens of each global batch of `batch_size` rows."""
    seqs = (rows["sample_mask"] > 0).double()
    toks = ((rows["token_mask"] > 0) & (rows["sample_mask"] > 0).unsqueeze(-1)).sum(dim=-1).double()
    return [
        GlobalCounts(valid_seqs=float(s.sum()), valid_toks=float(t.sum()))
        for s, t in zip(seqs.split(batch_size), toks.split(batch_size), strict=True)
    ]
