"""Sharding and microbatching: no row lost or duplicated, budgets respected, ranks in step."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.row_planner import PACKERS, RowPlanner
from rl_core.errors import DataError

BUDGET = 24
ALGORITHMS = st.sampled_from(sorted(PACKERS))


def batch_of(lengths: list[int], width: int | None = None) -> BatchedDataDict[Any]:
    """Row r has the token r + 1 `lengths[r]` times."""
    width = width or max(lengths)
    place = torch.arange(width)
    length = torch.tensor(lengths)
    number = torch.arange(1, len(lengths) + 1)
    return BatchedDataDict(
        {
            "input_ids": torch.where(place < length.unsqueeze(1), number.unsqueeze(1), 0),
            "input_lengths": length,
            "idx": list(range(len(lengths))),
        }
    )


def dynamic(round_to: int = 1, budget: int = BUDGET) -> Any:
    return {
        "max_tokens_per_microbatch": budget,
        "sequence_length_round": round_to,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


def packing(algorithm: Any = "first_fit_decreasing", multiple: int = 1) -> Any:
    return {
        "max_tokens_per_microbatch": BUDGET,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
    }


@st.composite
def sharded_cases(draw):
    """Lengths of whole global batches, shards that divide a global batch, rows of a global batch."""
    shards = draw(st.integers(1, 4))
    batch_size = shards * draw(st.integers(1, 4))
    rows = batch_size * draw(st.integers(1, 3))
    return draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows)), shards, batch_size


def test_the_example_of_the_design_deals_every_chunk_to_every_shard():
    batch = BatchedDataDict({"x": list("AABBCCDD")})
    assert [shard["x"] for shard in batch.shard_by_batch_size(2, 2)] == [list("ABCD"), list("ABCD")]


def test_without_a_batch_size_each_shard_is_one_contiguous_part():
    shards = BatchedDataDict({"x": list("ABCDEF")}).shard_by_batch_size(2)
    assert [shard["x"] for shard in shards] == [list("ABC"), list("DEF")]


@given(sharded_cases())
def test_plain_shards_keep_global_batches_and_every_row_once(case):
    lengths, shards, batch_size = case
    batch = batch_of([max(length, 1) for length in lengths])
    parts = batch.shard_by_batch_size(shards, batch_size)
    for number in range(len(lengths) // batch_size):
        dealt = [row for part in parts for row in part.get_batch(number)["idx"]]
        assert dealt == list(range(number * batch_size, (number + 1) * batch_size))


def check_plan(batch: BatchedDataDict[Any], parts: list[Any], order: list[int], batch_size: int) -> None:
    joined = BatchedDataDict.from_batches(parts)
    assert joined["idx"] == order
    joined.reorder_data(order)
    assert joined["idx"] == batch["idx"]
    assert torch.equal(joined["input_ids"], batch["input_ids"])
    for number in range(batch.size // batch_size):
        chunks = [part.get_batch(number) for part in parts]
        rows = sorted(row for chunk in chunks for row in chunk["idx"])
        assert rows == list(range(number * batch_size, (number + 1) * batch_size))
        assert len({len(chunk.micro_batch_indices[0]) for chunk in chunks}) == 1


@given(sharded_cases(), st.sampled_from([1, 4, 8]))
def test_a_token_budget_loses_no_row_keeps_ranks_in_step_and_reorders_to_the_identity(case, round_to):
    lengths, shards, batch_size = case
    batch = batch_of([max(length, 1) for length in lengths])
    parts, order = batch.shard_by_batch_size(shards, batch_size, dynamic_batching_args=dynamic(round_to))
    check_plan(batch, parts, order, batch_size)
    for part in parts:
        microbatches = list(part.make_microbatch_iterator_with_dynamic_shapes())
        assert [row for microbatch in microbatches for row in microbatch["idx"]] == part["idx"]
        for microbatch in microbatches:
            tokens = microbatch["input_ids"]
            assert tokens.numel() <= BUDGET
            assert tokens.shape[1] % round_to == 0 or tokens.shape[1] == batch["input_ids"].shape[1]
            assert torch.equal((tokens != 0).sum(1), microbatch["input_lengths"])


@given(sharded_cases(), ALGORITHMS, st.sampled_from([1, 4]))
def test_packing_loses_no_row_keeps_ranks_in_step_and_reorders_to_the_identity(case, algorithm, multiple):
    lengths, shards, batch_size = case
    batch = batch_of([max(length, 1) for length in lengths])
    parts, order = batch.shard_by_batch_size(shards, batch_size, sequence_packing_args=packing(algorithm, multiple))
    check_plan(batch, parts, order, batch_size)
    for part in parts:
        microbatches = list(part.make_microbatch_iterator_for_packable_sequences())
        assert [row for microbatch in microbatches for row in microbatch["idx"]] == part["idx"]
        totals = [length for lengths in part.micro_batch_lengths for length in lengths]
        padded = [int((-(-each["input_lengths"] // multiple) * multiple).sum()) for each in microbatches]
        assert padded == totals
        assert max(totals) <= BUDGET


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 4))
def test_uneven_rows_shard_under_a_budget_or_say_that_they_are_too_few(lengths, shards):
    batch = batch_of(lengths)
    try:
        parts, order = batch.shard_by_batch_size(shards, dynamic_batching_args=dynamic())
    except DataError as error:
        if "fewer shards" not in str(error):
            raise
        reject()
    check_plan(batch, parts, order, batch.size)


def test_packed_microbatches_at_the_same_position_of_their_shards_cost_about_the_same():
    batch = batch_of([4, 20, 8, 24, 16, 23, 12, 22])
    shards = RowPlanner(rows=8, shards=2, batch_size=None).by_tokens(batch, packing("concatenative"), packed=True)
    lengths = [shard.micro_batch_lengths[0] for shard in shards]
    assert sorted(itertools.chain(*lengths), reverse=True) == [length for pair in zip(*lengths, strict=True) for length in pair]


def test_rows_of_a_prompt_that_fill_a_microbatch_exactly_compute_their_prefix_once():
    batch = BatchedDataDict({"input_ids": torch.ones(2, 16, dtype=torch.int64), "input_lengths": torch.tensor([16, 16])})
    batch["input_ids"][1, 8:] = 2
    [plan] = RowPlanner(rows=2, shards=1, batch_size=None, prompts=[0, 0]).by_tokens(batch, packing(), packed=True)
    assert plan.micro_batch_lengths == [[BUDGET]]


def test_a_row_over_the_budget_is_refused_with_its_number():
    with pytest.raises(DataError, match="row 1 needs 30 tokens, but a microbatch holds at most 24"):
        batch_of([3, 30]).shard_by_batch_size(1, dynamic_batching_args=dynamic())
    with pytest.raises(DataError, match="row 1 needs 30 tokens, but a microbatch holds at most 24"):
        batch_of([3, 30]).shard_by_batch_size(1, sequence_packing_args=packing())


def test_uneven_splits_are_rejected():
    batch = batch_of([1] * 6)
    with pytest.raises(DataError, match="does not split evenly over 4 shards"):
        batch.shard_by_batch_size(4)
    with pytest.raises(DataError, match="whole global batches of 4"):
        batch.shard_by_batch_size(2, 4)
    with pytest.raises(DataError, match="mutually exclusive"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(), sequence_packing_args=packing())


def test_microbatches_need_a_plan():
    with pytest.raises(DataError, match="dynamic_batching_args"):
        list(batch_of([1]).make_microbatch_iterator_with_dynamic_shapes())


@given(st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 2**31))
def test_padding_values_do_not_change_a_plan(lengths, garbage):
    clean = batch_of(lengths, width=10)
    dirty = batch_of(lengths, width=10)
    dirty["input_ids"] = torch.where(clean["input_ids"] == 0, garbage, clean["input_ids"])
    for args in ({"dynamic_batching_args": dynamic()}, {"sequence_packing_args": packing()}):
        assert clean.shard_by_batch_size(2, **args)[1] == dirty.shard_by_batch_size(2, **args)[1]
