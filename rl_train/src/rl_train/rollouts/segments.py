"""Batches in which a rollout has several rows, one for each segment, as batches with one row per rollout, and back.

Rewards, baselines and statistics belong to rollouts, and tokens to rows. Whatever compares rewards or sums over the tokens of
an answer is computed on `join_segments(batch)`, in which the row of a rollout has the tokens of its segments one after the
other. The results are moved back with `split_segments` and `spread`. If each rollout has one row, all of them return their
argument.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.dispatch.replica_rows import padding_rows

_Column = TypeVar("_Column", torch.Tensor, list[Any])


def rows_of_rollouts(batch: BatchedDataDict[Any]) -> list[list[int]]:
    """The rows of each rollout, in the order of the batch. Without `rollout_ids`, each row is a rollout."""
    if "rollout_ids" not in batch:
        return [[row] for row in range(batch.size)]
    rows: dict[int, list[int]] = {}
    for row, rollout in enumerate(batch["rollout_ids"].tolist()):
        rows.setdefault(rollout, []).append(row)
    return list(rows.values())


def has_segments(batch: BatchedDataDict[Any]) -> bool:
    """Whether a rollout has several rows."""
    return "rollout_ids" in batch and len(batch["rollout_ids"].unique()) < batch.size


def join_segments(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The batch with one row per rollout, which has the tokens of all its segments.

    Other columns are those of the rollout's first row. `input_lengths` is the number of tokens of all segments.
    """
    if not has_segments(batch):
        return batch
    rollouts = rows_of_rollouts(batch)
    lengths = batch["input_lengths"].tolist()
    joined: BatchedDataDict[Any] = BatchedDataDict()
    for key, column in batch.items():
        if isinstance(column, torch.Tensor) and column.ndim > 1:
            rows = [torch.cat([column[row, : lengths[row]] for row in rollout]) for rollout in rollouts]
            joined[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_value(key))
        elif isinstance(column, torch.Tensor):
            joined[key] = column[[rollout[0] for rollout in rollouts]]
        else:
            joined[key] = [column[rollout[0]] for rollout in rollouts]
    joined["input_lengths"] = torch.tensor([sum(lengths[row] for row in rollout) for rollout in rollouts], dtype=torch.int64)
    return joined


def split_segments(values: torch.Tensor, batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] values of each token of the batch, 0 on padding.

    Args:
        values: [R, T'] of each token of `join_segments(batch)`.
        batch: B rows.
    """
    if not has_segments(batch):
        return values
    split = torch.zeros(batch["input_ids"].shape, dtype=values.dtype)
    lengths = batch["input_lengths"].tolist()
    for number, rows in enumerate(rows_of_rollouts(batch)):
        start = 0
        for row in rows:
            split[row, : lengths[row]] = values[number, start : start + lengths[row]]
            start += lengths[row]
    return split


def spread(column: _Column, batch: BatchedDataDict[Any]) -> _Column:
    """A column of R rollouts as a column of the B rows of the batch.

    Args:
        column: R entries, in the order of `join_segments(batch)`.
        batch: B rows.
    """
    if not has_segments(batch):
        return column
    number = [0] * batch.size
    for rollout, rows in enumerate(rows_of_rollouts(batch)):
        for row in rows:
            number[row] = rollout
    return column[number] if isinstance(column, torch.Tensor) else [column[each] for each in number]


def rollout_means(values: torch.Tensor, batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[R] mean over the trained tokens of each rollout, 0.0 if it has none.

    Args:
        values: [B, T].
        batch: B rows.
    """
    trained = batch["token_mask"] > 0
    sums, counts = torch.where(trained, values, 0.0).sum(-1), trained.sum(-1)
    rollouts = rows_of_rollouts(batch)
    totals = torch.stack([sums[rows].sum() for rows in rollouts])
    return totals / torch.stack([counts[rows].sum() for rows in rollouts]).clamp(min=1)


def optimizer_batches(
    batch: BatchedDataDict[Any], rollouts_per_update: int | None, *, multiple_of: int
) -> tuple[BatchedDataDict[Any], int | None]:
    """The rows for `TrainableInterface.train` and its `gbs`, so that each optimizer step trains on whole rollouts.

    The number of optimizer steps is the same as with one row per rollout. Steps with fewer rows are filled with rows that are
    masked out. If each rollout has one row, nothing changes and `gbs` is None.

    Args:
        batch: the rows of a step; the rows of a rollout are adjacent.
        rollouts_per_update: `train_global_batch_size`; None for all at once.
        multiple_of: number of data-parallel ranks.
    """
    if not has_segments(batch):
        return batch, None
    rollouts = rows_of_rollouts(batch)
    size = rollouts_per_update or len(rollouts)
    updates = [
        [row for rollout in rollouts[start : start + size] for row in rollout] for start in range(0, len(rollouts), size)
    ]
    most = -(-max(len(rows) for rows in updates) // multiple_of) * multiple_of
    filled = []
    for rows in updates:
        filled.append(batch.select_indices(rows))
        if len(rows) < most:
            filled.append(padding_rows(batch, rows[0], most - len(rows)))
    return BatchedDataDict.from_batches(filled), most
