"""Right padding, attention masks, the table of batch keys and the page generated from it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.padding import lengths_from_attention_mask, verify_right_padding, with_input_lengths
from rl_core.data.schema import PAD_VALUES, SCHEMA, as_markdown, check_batch, pad_value, pad_values
from rl_core.errors import DataError


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_a_right_padded_mask_counts_its_rows(lengths):
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
    for form in (mask, mask.long(), mask.float()):
        assert lengths_from_attention_mask(form).tolist() == lengths


@pytest.mark.parametrize("row", [[0, 1, 1], [1, 0, 1], [1, 2, 0]], ids=["left padding", "hole", "no mask"])
def test_a_mask_that_is_not_right_padded_is_rejected(row):
    with pytest.raises(DataError, match="attention_mask"):
        lengths_from_attention_mask(torch.tensor([[1, 1, 0], row]))


def test_a_mask_is_converted_to_lengths_and_removed():
    data = BatchedDataDict({"input_ids": torch.tensor([[1, 2, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])})
    accepted = with_input_lengths(data)
    assert accepted["input_lengths"].tolist() == [2]
    assert "attention_mask" not in accepted
    assert "attention_mask" in data


def test_lengths_that_contradict_a_mask_and_batches_with_neither_are_refused():
    data = BatchedDataDict({"attention_mask": torch.tensor([[1, 1, 0]]), "input_lengths": torch.tensor([3])})
    with pytest.raises(DataError, match="pass only one"):
        with_input_lengths(data)
    with pytest.raises(DataError, match="needs input_lengths"):
        with_input_lengths(BatchedDataDict({"input_ids": torch.ones(1, 1)}))


def test_right_padding_is_verified_for_prompts_and_for_outputs():
    good = {"input_ids": torch.tensor([[5, 0], [5, 5]]), "input_lengths": torch.tensor([1, 2])}
    assert verify_right_padding(good) == (True, None)
    bad = {"output_ids": torch.tensor([[0, 5, 6]]), "unpadded_sequence_lengths": torch.tensor([2])}
    ok, message = verify_right_padding(bad, raise_error=False)
    assert not ok
    assert message is not None
    assert "position 2 holds 6 instead of the padding 0" in message
    with pytest.raises(DataError, match="row 0 has 2 tokens"):
        verify_right_padding(bad)
    with pytest.raises(DataError, match="of row 0 is 4"):
        verify_right_padding({"input_ids": torch.ones(1, 3), "input_lengths": torch.tensor([4])})


def good_batch() -> dict:
    return {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "input_lengths": torch.tensor([3, 1]),
        "token_mask": torch.zeros(2, 3),
        "idx": [0, 1],
        "a key of a plugin": object(),
    }


def test_a_batch_of_the_table_passes():
    check_batch(good_batch(), required=["input_ids", "token_mask", "idx"])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "input_ids",
            torch.zeros(2, 3),
            r"'input_ids': found a tensor \[2, 3\] of float32, expected a tensor \[B, T\] of int64",
        ),
        ("input_lengths", torch.tensor([[1], [2]]), r"'input_lengths': found a tensor \[2, 1\]"),
        ("token_mask", torch.zeros(2, 4), "'token_mask' has 4 token positions, expected the 3 of 'input_ids'"),
        ("idx", torch.tensor([0, 1]), "'idx': found a tensor .* expected a list"),
        ("idx", [0, 1, 2], "'idx' has 3 rows, expected the 2 of 'input_ids'"),
    ],
)
def test_a_batch_that_departs_from_the_table_names_key_found_and_expected(key, value, said):
    with pytest.raises(DataError, match=said):
        check_batch({**good_batch(), key: value}, required=["input_ids", "token_mask"])


def test_a_missing_key_is_named_with_its_form():
    with pytest.raises(DataError, match=r"'advantages' is missing: found .* expected a tensor \[B, T\] of float32"):
        check_batch(good_batch(), required=["advantages"])


def test_padding_is_zero_but_for_token_ids_of_a_model():
    assert set(PAD_VALUES.values()) == {0}
    assert pad_value("input_ids", pad_token_id=7) == 7
    assert pad_value("logprobs", pad_token_id=7) == 0.0
    assert pad_value("a key of a plugin") == 0
    assert {key for key, value in pad_values(pad_token_id=7).items() if value == 7} == {"input_ids", "output_ids", "token_ids"}


def test_the_page_of_batch_keys_is_what_the_table_prints():
    page = Path(__file__).parents[3] / "docs" / "batch_keys.md"
    assert page.read_text(encoding="utf-8") == as_markdown(), "run: python -m rl_core.data.schema > docs/batch_keys.md"
    assert all(f"`{key}`" in as_markdown() for key in SCHEMA)
