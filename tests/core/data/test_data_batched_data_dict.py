"""Properties of `BatchedDataDict` as a table of rows."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict, SlicedDataDict
from rl_core.errors import DataError


def batch_of(rows: int, width: int = 3, first: int = 0) -> BatchedDataDict[Any]:
    number = torch.arange(first, first + rows)
    return BatchedDataDict(
        {
            "input_ids": number.unsqueeze(1) * 100 + torch.arange(width),
            "rewards": number.float(),
            "idx": number.tolist(),
            "extra_env_info": [{"row": row, "tokens": torch.tensor([row])} for row in number.tolist()],
        }
    )


def rows_of(batch: BatchedDataDict[Any]) -> list[int]:
    """The rows' numbers, after checking that every column agrees on them."""
    numbers: list[int] = batch["rewards"].long().tolist()
    assert batch["idx"] == numbers
    assert (batch["input_ids"][:, 0] // 100).tolist() == numbers
    assert [info["row"] for info in batch["extra_env_info"]] == numbers
    return numbers


@given(rows=st.integers(1, 12), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_joining_the_slices_of_a_batch_gives_the_batch(rows, cuts):
    batch = batch_of(rows)
    borders = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    parts = [batch.slice(start, end) for start, end in itertools.pairwise(borders)]
    assert rows_of(BatchedDataDict.from_batches(parts)) == list(range(rows))


@given(widths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_joining_pads_on_the_right_with_the_value_of_the_key(widths):
    batches = [{"input_ids": torch.ones(2, width, dtype=torch.int64)} for width in widths]
    joined = BatchedDataDict.from_batches(batches, pad_value_dict={"input_ids": 7})["input_ids"]
    assert joined.shape == (2 * len(widths), max(widths))
    expected = [[1] * width + [7] * (max(widths) - width) for width in widths for _ in range(2)]
    assert joined.tolist() == expected


def test_joining_pads_the_token_axis_of_tensors_of_more_axes():
    joined = BatchedDataDict.from_batches([{"x": torch.ones(1, 2, 3)}, {"x": torch.ones(2, 4, 3)}])["x"]
    assert joined.shape == (3, 4, 3)
    assert joined[0].sum() == 6


def test_joining_batches_of_other_keys_is_a_key_error_that_names_them():
    with pytest.raises(KeyError, match=r"batch 1 and batch 0 .*\['b'\]"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": [1], "b": [2]}])


@pytest.mark.parametrize(
    "other", [{"a": [1]}, {"a": torch.ones(1, 2)}, {"a": torch.ones(1, dtype=torch.int64)}], ids=["list", "axes", "dtype"]
)
def test_joining_columns_of_different_kinds_is_refused(other):
    with pytest.raises(DataError, match="'a'"):
        BatchedDataDict.from_batches([{"a": torch.ones(1)}, other])


@given(rows=st.integers(1, 6), repeats=st.integers(1, 4))
def test_repeating_places_copies_of_a_row_next_to_each_other(rows, repeats):
    repeated = batch_of(rows).repeat_interleave(repeats)
    assert rows_of(repeated) == [row for row in range(rows) for _ in range(repeats)]


def test_repeated_list_entries_are_separate_objects():
    repeated = batch_of(1).repeat_interleave(2)
    repeated["extra_env_info"][0]["tokens"] += 5
    assert repeated["extra_env_info"][1]["tokens"].item() == 0


@given(order=st.permutations(range(7)))
def test_reordering_undoes_a_selection(order):
    batch = batch_of(7)
    for indices in (order, torch.tensor(order)):
        selected = batch.select_indices(indices)
        assert rows_of(selected) == order
        selected.reorder_data(indices)
        assert rows_of(selected) == list(range(7))


def test_reordering_needs_a_permutation():
    with pytest.raises(DataError, match="not a permutation"):
        batch_of(3).reorder_data([0, 0, 1])


def test_a_bool_tensor_selects_its_true_rows():
    assert rows_of(batch_of(4).select_indices(torch.tensor([True, False, False, True]))) == [0, 3]


def test_chunks_are_equal_contiguous_parts():
    chunks = [batch_of(6).chunk(rank, 3) for rank in range(3)]
    assert [rows_of(chunk) for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]
    assert isinstance(chunks[0], SlicedDataDict)
    with pytest.raises(DataError, match="4 equal shards of 6 rows"):
        batch_of(6).chunk(0, 4)


def test_slices_are_views_of_the_whole():
    batch = batch_of(4)
    assert batch.slice(1, 3)["input_ids"].data_ptr() == batch["input_ids"][1:].data_ptr()


def test_truncation_cuts_every_tensor_with_that_axis_and_leaves_others():
    batch = batch_of(2, width=5)
    batch.truncate_tensors(1, 2)
    assert batch["input_ids"].shape == (2, 2)
    assert batch["rewards"].shape == (2,)


@pytest.mark.parametrize("value", [3, torch.tensor(1.0), (1, 2), "ab"])
def test_a_column_must_be_a_tensor_or_a_list(value):
    with pytest.raises(DataError, match="column 'x'"):
        BatchedDataDict({"x": value})


def test_a_column_of_another_batch_size_is_refused_and_names_both():
    with pytest.raises(DataError, match=r"'y' has 3 rows and column 'x' has 2"):
        BatchedDataDict({"x": [1, 2], "y": torch.ones(3)})


def test_the_only_column_may_be_replaced_by_one_of_another_size():
    batch = BatchedDataDict({"x": [1, 2]})
    batch["x"] = [1]
    assert batch.size == 1


def test_a_batch_moves_and_reads_as_a_dict():
    batch = batch_of(2)
    assert batch.to("cpu") is batch
    assert BatchedDataDict().size == 0


def test_microbatches_by_count_cover_all_rows_in_order():
    batch = batch_of(5)
    microbatches = list(batch.make_microbatch_iterator(2))
    assert [rows_of(microbatch) for microbatch in microbatches] == [[0, 1], [2, 3], [4]]


def test_the_documented_class_name_is_accepted():
    batch = BatchedDataDict["GenerationDatumSpec"]({"input_ids": torch.ones(2, 3)})
    assert batch.size == 2
    assert batch.get("max_new_tokens", 100) == 100
