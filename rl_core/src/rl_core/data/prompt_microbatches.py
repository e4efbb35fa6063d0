"""Assigns rows to shards and microbatches such that rows of the same prompt stay together, to compute their prefix once.

A prompt's rows are split if they do not fit into a microbatch, or if there are fewer prompts than microbatches; then each part
computes the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from rl_core.data.bin_packing import get_packer
from rl_core.data.microbatches import (
    DynamicBatchingArgs,
    Microbatch,
    SequencePackingArgs,
    ShardPlan,
    deal,
    global_batches,
    shard_by_count,
)
from rl_core.data.shared_prefix import PrefixGroup, common_prefix, computed_tokens
from rl_core.errors import DataError

Cost = Callable[[Sequence[list[int]]], int]
"""Number of tokens to compute for units of one prompt."""


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """The rows of a batch, with what planning reads of them.

    Attributes:
        prompt_ids: [B] int64.
        rows_per_unit: number of consecutive rows that are read together; a unit has the prompt of its first row.
    """

    prompt_ids: torch.Tensor
    rows_per_unit: int = 1

    def units(self, start: int, end: int) -> list[list[list[int]]]:
        """The rows of each unit of each prompt within a global batch, prompts in the order of their first rows."""
        unit = self.rows_per_unit
        if start % unit or end % unit:
            raise DataError(
                f"rows {start} to {end} of a global batch cannot be read {unit} at a time: use a multiple of {unit}"
            )
        prompts: dict[int, list[list[int]]] = {}
        for first in range(start, end, unit):
            prompts.setdefault(int(self.prompt_ids[first]), []).append(list(range(first, first + unit)))
        return list(prompts.values())


def shard_by_prompt(
    columns: Mapping[str, Any],
    prompts: PromptRows,
    shards: int,
    *,
    batch_size: int | None,
    args: DynamicBatchingArgs | SequencePackingArgs | None,
) -> list[ShardPlan]:
    """Plan shards, and with a token budget or packing (`args`) also microbatches, with the rows of a prompt together.

    `columns` has the columns that `args` names. Other arguments and errors as `shard_by_count` and `shard_prompts_by_tokens`.
    """
    if args is None:
        return shard_prompts_by_count(prompts, shards, batch_size=batch_size)
    return shard_prompts_by_tokens(
        prompts,
        columns[args["input_key"]],
        columns[args["input_lengths_key"]],
        shards,
        batch_size=batch_size,
        max_tokens=args["max_tokens_per_microbatch"],
        algorithm=cast(Any, args).get("algorithm", "modified_first_fit_decreasing"),
    )


def shard_prompts_by_count(prompts: PromptRows, shards: int, *, batch_size: int | None) -> list[ShardPlan]:
    """`shard_by_count` of the rows, ordered by prompt within each global batch."""
    rows = len(prompts.prompt_ids)
    order = [
        row
        for start, end in global_batches(rows, batch_size)
        for units in prompts.units(start, end)
        for unit in units
        for row in unit
    ]
    plans = shard_by_count(rows, shards, batch_size=batch_size)
    for plan in plans:
        plan.rows = [order[index] for index in plan.rows]
    return plans


def shard_prompts_by_tokens(
    prompts: PromptRows,
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    shards: int,
    *,
    batch_size: int | None,
    max_tokens: int,
    algorithm: str,
) -> list[ShardPlan]:
    """Plan microbatches of at most `max_tokens` computed tokens, the fullest first; all shards get the same number of them.

    The rows of a prompt share their prefix. `input_ids` [B, T] int64 is right-padded, `lengths` [B] int64 has the tokens
    of each row; other arguments as `shard_by_packing`.

    Raises:
        DataError: a unit exceeds the budget, or a global batch has fewer units than required microbatches.
    """
    sizes = lengths.tolist()

    def cost(units: Sequence[list[int]]) -> int:
        rows = [row for unit in units for row in unit]
        return computed_tokens([PrefixGroup(rows=rows, prefix=common_prefix(input_ids[rows], lengths[rows]))], sizes)

    plans = [ShardPlan() for _ in range(shards)]
    for start, end in global_batches(len(sizes), batch_size):
        parts = [part for units in prompts.units(start, end) for part in _fitting(units, max_tokens, cost)]
        packer = get_packer(algorithm, max_tokens, min_bin_count=shards, bin_count_multiple=shards)
        while (wanted := _bins_needed(algorithm, max_tokens, [cost(part) for part in parts], shards)) > len(parts):
            parts = _split_largest(parts, cost, wanted=wanted, shards=shards)
        costs = [cost(part) for part in parts]
        bins = [
            Microbatch(
                rows=[row for number in sorted(group) for unit in parts[number] for row in unit],
                length=sum(costs[number] for number in group),
            )
            for group in packer.pack(costs)
        ]
        deal(sorted(bins, key=lambda microbatch: -microbatch.length), plans)
    return plans


def _fitting(units: list[list[int]], max_tokens: int, cost: Cost) -> list[list[list[int]]]:
    """The units of a prompt in as few parts as fit the budget."""
    parts: list[list[list[int]]] = []
    for unit in units:
        if parts and cost([*parts[-1], unit]) <= max_tokens:
            parts[-1].append(unit)
        elif cost([unit]) <= max_tokens:
            parts.append([unit])
        else:
            raise DataError(
                f"row {unit[0]} needs {cost([unit])} tokens, but a microbatch holds at most {max_tokens}: raise "
                "max_tokens_per_microbatch or shorten the row"
            )
    return parts


def _bins_needed(algorithm: str, max_tokens: int, costs: list[int], shards: int) -> int:
    packed = len(get_packer(algorithm, max_tokens).pack(costs))
    return -(-packed // shards) * shards


def _split_largest(parts: list[list[list[int]]], cost: Cost, *, wanted: int, shards: int) -> list[list[list[int]]]:
    """`parts`, with the most expensive one of several units halved."""
    divisible = [number for number, part in enumerate(parts) if len(part) > 1]
    if not divisible:
        raise DataError(
            f"{len(parts)} rows cannot fill {wanted} microbatches, a multiple of {shards} shards: use more rows, a larger "
            "max_tokens_per_microbatch, or fewer shards"
        )
    number = max(divisible, key=lambda each: cost(parts[each]))
    half = (len(parts[number]) + 1) // 2
    return [*parts[:number], parts[number][:half], parts[number][half:], *parts[number + 1 :]]
