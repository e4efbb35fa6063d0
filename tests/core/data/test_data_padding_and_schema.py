"""Right padding, attention masks and the table of batch keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import lengths_from_attention_mask, with_input_lengths
from rl_core.data.schema import SCHEMA, pad_value
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationOutputSpec
from rl_train.data.messages import DatumSpec


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


def test_padding_is_zero():
    assert {pad_value(key) for key in SCHEMA} == {0}
    assert pad_value("a key of a plugin") == 0
    assert {key for key, spec in SCHEMA.items() if spec.holds_tokens} == {"input_ids", "output_ids", "token_ids"}


def test_every_column_of_prompts_and_of_engines_is_in_the_table():
    columns = {key for spec in (DatumSpec, GenerationDatumSpec, GenerationOutputSpec) for key in spec.__annotations__}
    assert "max_new_tokens" in columns
    assert sorted(columns - set(SCHEMA)) == []
