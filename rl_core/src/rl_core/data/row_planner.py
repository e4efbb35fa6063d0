"""Assigns rows to shards, microbatches and bins, by their lengths and prompts. Deterministic: independent planners agree.

With a token budget or packing, every shard of a global batch gets the *same number* of microbatches: ranks synchronize in a
collective once per microbatch, so a rank with fewer would make the others wait forever.

Rows that a loss reads together, such as the two of a pair, are planned as one unit, so they stay adjacent. Units of one prompt
form a group, whose rows compute their common prefix once. A group is split if it does not fit into a microbatch, or if there
are fewer groups than microbatches; then each part computes the prefix. Without prompts, each unit is a group.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, cast

from rl_core.data.shared_prefix import PrefixGroup, common_prefix, computed_tokens
from rl_core.errors import DataError

Unit = Sequence[int]
"""Rows that are read together."""


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
        algorithm: Name of a packing algorithm (`PACKERS`).
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


@dataclass(frozen=True, kw_only=True)
class RowPlanner:
    """Plans the shards of one batch.

    Attributes:
        rows: Number of rows.
        shards: Number of shards.
        batch_size: Rows of a global batch; None for all.
        rows_per_unit: Number of consecutive rows that are read together.
        prompts: The prompt of each row, of which that of a unit's first row counts; None to plan each unit on its own.
    """

    rows: int
    shards: int
    batch_size: int | None
    rows_per_unit: int = 1
    prompts: Sequence[int] | None = None

    def by_count(self) -> list[ShardPlan]:
        """Split each global batch into equal runs of rows: [A A B B C C D D], 2 by 2 → [A B C D] twice.

        Raises:
            DataError: The rows do not split evenly.
        """
        plans = [ShardPlan() for _ in range(self.shards)]
        for start, end in global_batches(self.rows, self.batch_size):
            count, more = divmod(end - start, self.shards)
            if more:
                raise DataError(
                    f"a global batch of {end - start} rows does not split evenly over {self.shards} shards: use a multiple of "
                    "the shards"
                )
            order = range(start, end) if self.prompts is None else _rows_of(itertools.chain(*self._groups(start, end)))
            for shard, plan in enumerate(plans):
                plan.rows.extend(order[shard * count : (shard + 1) * count])
                plan.elem_counts_per_gb.append(count)
        return plans

    def by_tokens(
        self, columns: Mapping[str, Any], args: DynamicBatchingArgs | SequencePackingArgs, *, packed: bool
    ) -> list[ShardPlan]:
        """Plan microbatches of a limited number of tokens; `columns` has the columns that `args` names.

        Rows of one prompt count the prefix common to all of them once, as if in one microbatch, and no padding.

        Raises:
            DataError: A unit exceeds the limit, or a global batch has too few units for an equal number of microbatches per
                shard.
        """
        ids, lengths = columns[args["input_key"]], columns[args["input_lengths_key"]]
        sizes: list[int] = lengths.tolist()
        if self.prompts is None and not packed:
            return self._by_padded_width(sizes, ids.shape[1], cast(DynamicBatchingArgs, args))
        groups = [] if self.prompts is None else [_rows_of(units) for units in self._groups(0, self.rows)]
        prefix_of = {row: prefix for rows in groups for prefix in [common_prefix(ids[rows], lengths[rows])] for row in rows}

        def with_prefix_once(units: Sequence[Unit]) -> int:
            return computed_tokens([PrefixGroup(rows=_rows_of(units), prefix=prefix_of[units[0][0]])], sizes)

        def padded(units: Sequence[Unit]) -> int:
            return sum(_round_up(sizes[row], multiple) for row in _rows_of(units))

        options = cast(dict[str, Any], args)
        multiple = options.get("sequence_length_pad_multiple", 1)
        return self._by_packing(
            padded if self.prompts is None else with_prefix_once,
            max_tokens=args["max_tokens_per_microbatch"],
            algorithm=options.get("algorithm", "modified_first_fit_decreasing"),
        )

    def _by_packing(self, cost: Callable[[Sequence[Unit]], int], *, max_tokens: int, algorithm: str) -> list[ShardPlan]:
        """Plan packed microbatches, the fullest first; a microbatch's length is the sum of the costs of its parts."""
        plans = [ShardPlan() for _ in range(self.shards)]
        for start, end in global_batches(self.rows, self.batch_size):
            parts = [part for units in self._groups(start, end) for part in _fitting(units, max_tokens, cost)]
            costs = [cost(part) for part in parts]
            while (wanted := _round_up(len(bins := pack(costs, max_tokens, algorithm=algorithm)), self.shards)) > len(parts):
                parts = _split_largest(parts, costs, wanted=wanted, shards=self.shards)
                costs = [cost(part) for part in parts]
            microbatches = [
                Microbatch(
                    rows=_rows_of(unit for number in sorted(group) for unit in parts[number]),
                    length=sum(costs[number] for number in group),
                )
                for group in split_to_count(bins, costs, wanted)
            ]
            _distribute(sorted(microbatches, key=lambda microbatch: -microbatch.length), plans)
        return plans

    def _by_padded_width(self, lengths: Sequence[int], width: int, args: DynamicBatchingArgs) -> list[ShardPlan]:
        """Plan microbatches of length-sorted rows, the most expensive first; `width` is the maximum width of a microbatch."""
        budget = args["max_tokens_per_microbatch"]

        def padded(unit: Unit) -> int:
            return min(_round_up(max(1, *(lengths[row] for row in unit)), args["sequence_length_round"]), width)

        plans = [ShardPlan() for _ in range(self.shards)]
        for start, end in global_batches(self.rows, self.batch_size):
            microbatches: list[list[Unit]] = []
            for [unit] in sorted(self._groups(start, end), key=lambda group: -max(lengths[row] for row in group[0])):
                if len(unit) * padded(unit) > budget:
                    raise _too_long(unit, padded(unit), budget)
                if microbatches and (len(microbatches[-1]) + 1) * len(unit) * padded(microbatches[-1][0]) <= budget:
                    microbatches[-1].append(unit)
                else:
                    microbatches.append([unit])
            while (wanted := _round_up(len(microbatches), self.shards)) > len(microbatches):
                sizes = [len(each) for each in microbatches]
                microbatches = _split_largest(microbatches, sizes, wanted=wanted, shards=self.shards)
            # Sorted by width: adjacent microbatches cost the same, so shard s takes every shards-th one.
            _distribute([Microbatch(rows=_rows_of(units), length=padded(units[0])) for units in microbatches], plans)
        return plans

    def _groups(self, start: int, end: int) -> list[list[Unit]]:
        """The units of each group of a global batch, in the order of their first rows; no unit spans two global batches."""
        size = self.rows_per_unit
        if start % size or end % size:
            raise DataError(
                f"{self.rows} rows in global batches of {self.batch_size or self.rows} cannot be read {size} at a time: make "
                f"both multiples of {size}"
            )
        groups: dict[int, list[Unit]] = {}
        for first in range(start, end, size):
            groups.setdefault(first if self.prompts is None else self.prompts[first], []).append(range(first, first + size))
        return list(groups.values())


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


def _distribute(microbatches: Sequence[Microbatch], plans: Sequence[ShardPlan]) -> None:
    """Assign the microbatches of one global batch to the shards in turn; their number must be a multiple of the shards."""
    for shard, plan in enumerate(plans):
        plan.add_global_batch(microbatches[shard :: len(plans)])


def _rows_of(units: Iterable[Unit]) -> list[int]:
    return [row for unit in units for row in unit]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _fitting(units: Sequence[Unit], max_tokens: int, cost: Callable[[Sequence[Unit]], int]) -> list[list[Unit]]:
    """The units of a group in as few parts as fit the limit."""
    parts: list[list[Unit]] = []
    for unit in units:
        if parts and cost([*parts[-1], unit]) <= max_tokens:
            parts[-1].append(unit)
        elif (tokens := cost([unit])) <= max_tokens:
            parts.append([unit])
        else:
            raise _too_long(unit, tokens, max_tokens)
    return parts


def _too_long(unit: Unit, tokens: int, max_tokens: int) -> DataError:
    together = "" if len(unit) == 1 else f" (as does each of the {len(unit)} rows that are read together)"
    return DataError(
        f"row {unit[0]} needs {tokens} tokens{together}, but a microbatch holds at most {max_tokens}: raise "
        "max_tokens_per_microbatch or shorten the row"
    )


def _split_largest(parts: list[list[Unit]], sizes: Sequence[int], *, wanted: int, shards: int) -> list[list[Unit]]:
    """`parts`, with the largest one of several units halved."""
    divisible = [number for number, part in enumerate(parts) if len(part) > 1]
    if not divisible:
        raise DataError(
            f"{len(_rows_of(itertools.chain(*parts)))} rows cannot fill {wanted} microbatches, a multiple of {shards} shards: "
            "use more rows, a larger max_tokens_per_microbatch, or fewer shards"
        )
    number = max(divisible, key=lambda each: sizes[each])
    half = (len(parts[number]) + 1) // 2
    return [*parts[:number], parts[number][:half], parts[number][half:], *parts[number + 1 :]]


def pack(lengths: Sequence[int], capacity: int, *, algorithm: str) -> list[list[int]]:
    """Row numbers by bin: every row once, no empty bin, none over capacity.

    Args:
        lengths: Tokens of each row.
        capacity: Maximum number of tokens in a bin.
        algorithm: A name in `PACKERS`, in any case.

    Raises:
        DataError: Unknown algorithm, or a row is longer than a bin.
    """
    packer = PACKERS.get(str(algorithm).lower())
    if packer is None:
        raise DataError(f"Unknown packing algorithm {algorithm!r}: choose one of {sorted(PACKERS)}.")
    for row, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise DataError(
                f"row {row} has {length} tokens, but a bin holds at most {capacity}: "
                "raise max_tokens_per_microbatch or shorten the row"
            )
    return packer(lengths, capacity) if lengths else []


def split_to_count(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split the fullest bins until there are `count`, which is at most the number of rows."""
    while len(bins) < count:
        weights = [sum(lengths[row] for row in rows) if len(rows) > 1 else -1 for rows in bins]
        fullest = weights.index(max(weights))
        bins[fullest : fullest + 1] = _halves(bins[fullest], lengths)
    return bins


def _halves(rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Two bins of about equal weight: longest row first, each into the lighter bin."""
    sides: list[list[int]] = [[], []]
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # An empty bin counts as lighter even if all rows have no tokens, so that neither stays empty.
        weights = [(sum(lengths[other] for other in side), len(side)) for side in sides]
        sides[weights.index(min(weights))].append(row)
    return sides


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for number, left in enumerate(room):
            if lengths[row] <= left:
                bins[number].append(row)
                room[number] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(capacity - lengths[row])
    return bins


def _concatenative(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in order; a new bin if the next row does not fit. Keeps the order but wastes the most space."""
    bins: list[list[int]] = [[]]
    left = capacity
    for row, length in enumerate(lengths):
        if length > left:
            bins.append([])
            left = capacity
        bins[-1].append(row)
        left -= length
    return bins


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest row first, into the first bin that fits: at most 11/9 of the fewest bins, plus 6/9 (Dósa 2007)."""
    return _first_fit(sorted(range(len(lengths)), key=lambda row: -lengths[row]), lengths, capacity)


def _first_fit_shuffle(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows in a shuffled order of fixed seed, into the first bin that fits: bins of mixed lengths."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    return _first_fit(order, lengths, capacity)


def _modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """MFFD of Johnson and Garey (1985): at most 71/60 of the fewest bins, plus 1.

    Each row longer than half a bin opens one; each such bin then takes a row longer than a third, or a pair longer than a
    sixth. The remaining rows fill the gaps, longest first, and the rest is packed first-fit decreasing.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    bins = [[row] for row in order if 2 * lengths[row] > capacity]
    rest = order[len(bins) :]

    def move_longest(into: list[int], *, above: float = -1.0) -> bool:
        """Move the longest remaining row that fits and is longer than `above`; False if there is none."""
        room = capacity - sum(lengths[row] for row in into)
        chosen = next((row for row in rest if above < lengths[row] <= room), None)
        if chosen is not None:
            rest.remove(chosen)
            into.append(chosen)
        return chosen is not None

    for rows in bins:
        move_longest(rows, above=capacity / 3)
    for rows in reversed(bins):
        small = [row for row in rest if capacity / 6 < lengths[row] <= capacity / 3]
        if len(rows) == 1 and len(small) > 1 and sum(lengths[row] for row in (*rows, *small[-2:])) <= capacity:
            rest.remove(small[-1])
            rows.append(small[-1])
            move_longest(rows, above=capacity / 6)
    for rows in bins:
        while move_longest(rows):
            pass
    return bins + _first_fit(rest, lengths, capacity)


PACKERS: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}
"""Packing algorithms by name: row numbers by bin, from the tokens of each row and the capacity of a bin."""
