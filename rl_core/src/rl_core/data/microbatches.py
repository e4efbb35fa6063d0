"""Assigns rows to shards and microbatches, by their lengths.

With a token budget or packing, every shard of a global batch gets the *same number* of microbatches: ranks synchronize in a
collective once per microbatch, so a rank with fewer would make the others wait forever.

Rows that a loss reads together (`rows_per_unit`, such as the two of a pair) are planned as one unit, so they stay adjacent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from rl_core.data.bin_packing import get_packer
from rl_core.errors import DataError


class DynamicBatchingArgs(TypedDict):
    """Microbatches of length-sorted rows under a token budget.

    Attributes:
        max_tokens_per_microbatch: Maximum of rows times padded width.
        sequence_length_round: The width is rounded up to a multiple of this (but never above T).
        input_key: The [B, T] column that determines T.
        input_lengths_key: The [B] column of row lengths, in tokens.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """Microbatches of packed rows.

    Attributes:
        max_tokens_per_microbatch: Maximum sum of padded lengths.
        input_key: The [B, T] column of tokens.
        input_lengths_key: The [B] column of row lengths, in tokens.
        algorithm: Name of a packing algorithm (`bin_packing.PACKERS`).
        sequence_length_pad_multiple: Each row's length is rounded up to a multiple of this (default 1).
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: NotRequired[int]


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows of one forward-backward pass, and its length: padded width (token budget) or total tokens (packing)."""

    rows: list[int]
    length: int


@dataclass(kw_only=True)
class ShardPlan:
    """The rows of one shard, in order, and their global batches and microbatches.

    Attributes:
        rows: Row numbers in the whole batch.
        elem_counts_per_gb: Number of rows of this shard in each global batch.
        micro_batch_indices: For each global batch, the (start, end) of each microbatch, relative to that global batch's
            first row in this shard; None if microbatches have a fixed number of rows.
        micro_batch_lengths: For each global batch, the length of each microbatch, in tokens; None likewise.
    """

    rows: list[int] = field(default_factory=list)
    elem_counts_per_gb: list[int] = field(default_factory=list)
    micro_batch_indices: list[list[tuple[int, int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None

    def add_global_batch(self, microbatches: Sequence[Microbatch]) -> None:
        """Append a global batch of these microbatches."""
        ends = [0]
        for microbatch in microbatches:
            self.rows.extend(microbatch.rows)
            ends.append(ends[-1] + len(microbatch.rows))
        self.elem_counts_per_gb.append(ends[-1])
        self.micro_batch_indices = [*(self.micro_batch_indices or []), list(itertools.pairwise(ends))]
        self.micro_batch_lengths = [*(self.micro_batch_lengths or []), [each.length for each in microbatches]]


def shard_by_count(rows: int, shards: int, *, batch_size: int | None) -> list[ShardPlan]:
    """Split each global batch into equal runs of rows: [A A B B C C D D], 2 by 2 → [A B C D] twice.

    `rows` is the number of rows in the batch, `batch_size` that of a global batch, None for all.

    Raises:
        DataError: The rows do not split evenly.
    """
    plans = [ShardPlan() for _ in range(shards)]
    for start, end in global_batches(rows, batch_size):
        count, more = divmod(end - start, shards)
        if more:
            raise DataError(
                f"a global batch of {end - start} rows does not split evenly over {shards} shards: use a multiple of the shards"
            )
        for shard, plan in enumerate(plans):
            first = start + shard * count
            plan.rows.extend(range(first, first + count))
            plan.elem_counts_per_gb.append(count)
    return plans


def shard_by_token_budget(
    lengths: Sequence[int],
    shards: int,
    *,
    batch_size: int | None,
    width: int,
    args: DynamicBatchingArgs,
    rows_per_unit: int = 1,
) -> list[ShardPlan]:
    """Plan microbatches of length-sorted rows under a token budget, the most expensive first.

    Other arguments as `shard_by_packing`; `width` is T of the batch, the maximum width of a microbatch.

    Raises:
        DataError: A unit exceeds the budget, or a global batch has too few rows for an equal number of microbatches per shard.
    """
    budget = args["max_tokens_per_microbatch"]
    units = _units(len(lengths), batch_size, rows_per_unit)
    longest = [max(lengths[row] for row in unit) for unit in units]

    def padded(unit: int) -> int:
        return min(_round_up(max(longest[unit], 1), args["sequence_length_round"]), width)

    def plan_one(start: int, end: int) -> list[Microbatch]:
        order = sorted(range(start // rows_per_unit, end // rows_per_unit), key=lambda unit: -longest[unit])
        microbatches: list[list[int]] = []
        for unit in order:
            if rows_per_unit * padded(unit) > budget:
                raise DataError(
                    f"row {unit * rows_per_unit} needs {padded(unit)} tokens{_together(rows_per_unit)}, but a microbatch holds "
                    f"at most {budget}: raise max_tokens_per_microbatch or shorten the row"
                )
            if microbatches and (len(microbatches[-1]) + 1) * rows_per_unit * padded(microbatches[-1][0]) <= budget:
                microbatches[-1].append(unit)
            else:
                microbatches.append([unit])
        _split_to_multiple(microbatches, shards)
        return [
            Microbatch(rows=[row for unit in group for row in units[unit]], length=padded(group[0])) for group in microbatches
        ]

    plans = [ShardPlan() for _ in range(shards)]
    for start, end in global_batches(len(lengths), batch_size):
        # Sorted by width: adjacent microbatches cost the same, so shard s takes every shards-th one.
        deal(plan_one(start, end), plans)
    return plans


def shard_by_packing(
    lengths: Sequence[int], shards: int, *, batch_size: int | None, args: SequencePackingArgs, rows_per_unit: int = 1
) -> list[ShardPlan]:
    """Plan packed microbatches, the fullest first; a microbatch's length is the sum of its padded rows.

    Args:
        lengths: Tokens of each row.
        shards: Number of shards.
        batch_size: Rows of a global batch; None for all.
        args: Algorithm and budget.
        rows_per_unit: Number of rows that are read together.

    Raises:
        DataError: A unit exceeds the budget, or a global batch has fewer units than required microbatches.
    """
    packer = get_packer(args["algorithm"], args["max_tokens_per_microbatch"], min_bin_count=shards, bin_count_multiple=shards)
    units = _units(len(lengths), batch_size, rows_per_unit)
    padded = [_round_up(length, args.get("sequence_length_pad_multiple", 1)) for length in lengths]
    whole = [sum(padded[row] for row in unit) for unit in units]
    plans = [ShardPlan() for _ in range(shards)]
    for start, end in global_batches(len(lengths), batch_size):
        first = start // rows_per_unit
        bins = [
            Microbatch(
                rows=[row for unit in sorted(group) for row in units[first + unit]],
                length=sum(whole[first + unit] for unit in group),
            )
            for group in packer.pack(whole[first : end // rows_per_unit])
        ]
        deal(sorted(bins, key=lambda microbatch: -microbatch.length), plans)
    return plans


def runs_of(size: int, rows: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of consecutive runs of `rows` rows that cover `size`; the last may be shorter."""
    if rows < 1:
        raise DataError(f"the batch size is {rows}: it must be at least 1")
    for start in range(0, size, rows):
        yield start, min(start + rows, size)


def global_batches(rows: int, batch_size: int | None) -> Iterator[tuple[int, int]]:
    """The (start, end) rows of each global batch of `batch_size` rows, None for all.

    Raises:
        DataError: there are no rows, or they do not divide evenly.
    """
    if rows == 0:
        raise DataError("a batch of 0 rows cannot be sharded: skip empty batches")
    batch_size = rows if batch_size is None else batch_size
    if batch_size < 1 or rows % batch_size:
        raise DataError(f"{rows} rows do not make whole global batches of {batch_size}: use a divisor of {rows}")
    return runs_of(rows, batch_size)


def deal(microbatches: Sequence[Microbatch], plans: Sequence[ShardPlan]) -> None:
    """Deal the microbatches of one global batch to the shards in turn; their number must be a multiple of the shards."""
    for shard, plan in enumerate(plans):
        plan.add_global_batch(microbatches[shard :: len(plans)])


def _units(rows: int, batch_size: int | None, rows_per_unit: int) -> list[range]:
    """The rows of each unit; no unit may span two global batches."""
    if rows % rows_per_unit or (batch_size or 0) % rows_per_unit:
        raise DataError(
            f"{rows} rows in global batches of {batch_size or rows} cannot be read {rows_per_unit} at a time: make both "
            f"multiples of {rows_per_unit}"
        )
    return [range(row, row + rows_per_unit) for row in range(0, rows, rows_per_unit)]


def _together(rows_per_unit: int) -> str:
    return "" if rows_per_unit == 1 else f" (as does each of the {rows_per_unit} rows that are read together)"


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _split_to_multiple(microbatches: list[list[int]], shards: int) -> None:
    """Halve the microbatches with the most rows, in place and in order, until their number is a multiple of the shards."""
    rows = sum(len(each) for each in microbatches)
    wanted = _round_up(len(microbatches), shards)
    if wanted > rows:
        raise DataError(
            f"{rows} rows cannot fill {wanted} microbatches, a multiple of {shards} shards: use more rows, a larger "
            "max_tokens_per_microbatch, or fewer shards"
        )
    while len(microbatches) < wanted:
        longest = max(range(len(microbatches)), key=lambda number: len(microbatches[number]))
        split = microbatches[longest]
        half = (len(split) + 1) // 2
        microbatches[longest : longest + 1] = [split[:half], split[half:]]
