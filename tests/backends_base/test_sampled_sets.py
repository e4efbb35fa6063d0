"""The tokens that top-k, top-p and min-p keep: what an engine records of them, and how the columns of a batch hold them."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_base.microbatches import MicrobatchRows, outside_sets, padded_input
from rl_backends_base.token_choice import SamplingParameters, next_tokens
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import (
    MOST_SET_IDS,
    SETS,
    Completion,
    SampledSets,
    joined_sets,
    kept_tokens,
    select_sets,
    to_output,
)
from rl_core.errors import DataError

PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.floats(0.3, 3.0),
    top_k=st.none() | st.integers(1, 3000),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
).filter(lambda parameters: parameters.is_filtered)


def members(sets, vocabulary):
    """[T, V] bool"""
    found = torch.zeros(len(sets["counts"]), vocabulary, dtype=torch.bool)
    found[kept_tokens(sets)] = True
    return found


def encoded(words):
    return SampledSets(counts=torch.tensor([len(each) for each in words], dtype=torch.int32), words=torch.cat(words))


def random_sets(rows, vocabulary, generator):
    """Sets of rows of unequal lengths; every third token has none."""
    made = []
    for length in rows:
        kept = torch.rand(length, vocabulary, generator=generator) < 0.3
        kept[::3] = False
        made.append(SampledSets(counts=kept.sum(1, dtype=torch.int32), words=kept.nonzero()[:, 1].to(torch.int32)))
    return made


@settings(max_examples=60, deadline=None)
@given(vocabulary=st.sampled_from([2, 31, 260, 3000]), parameters=PARAMETERS, seed=st.integers(0, 999), ties=st.booleans())
def test_recorded_sets_give_the_log_probability_of_the_engine(vocabulary, parameters, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocabulary, generator=generator) * torch.tensor([0.01, 0.5, 1, 2, 4, 8]).unsqueeze(1)
    logits = logits.round() if ties else logits
    words = []
    tokens, logprobs, _ = next_tokens(
        logits.clone(), parameters=parameters, greedy=False, seeds=torch.arange(6), positions=torch.full((6,), seed), sets=words
    )
    kept = members(encoded(words), vocabulary)
    scores = (logits / parameters.temperature).masked_fill(~kept, -torch.inf)
    expected = scores.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    # The float32 softmax has a relative error of 1e-7 times the size of the logits, here at most about 100.
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    # All tokens that tie with the last of the kept ones are kept, so the kept are those above a threshold.
    lowest = torch.where(kept, logits, torch.inf).amin(dim=-1, keepdim=True)
    assert torch.equal(kept, logits >= lowest)
    limits = [MOST_SET_IDS if len(each) <= MOST_SET_IDS and each[0] >= 0 else 1 + -(-vocabulary // 32) for each in words]
    assert all(len(each) <= limit for each, limit in zip(words, limits, strict=True))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99), data=st.data())
def test_sets_follow_their_rows_through_shards_orders_and_processes(rows, seed, data):
    sets = random_sets(rows, 70, torch.Generator().manual_seed(seed))
    lengths = torch.tensor(rows)
    ids = (torch.arange(max(rows)) < lengths.unsqueeze(1)).long() * torch.arange(1, len(rows) + 1).unsqueeze(1)
    batch = BatchedDataDict({"input_ids": ids, "input_lengths": lengths, SETS: sets})
    order = data.draw(st.permutations(range(len(rows))))
    moved = pickle.loads(pickle.dumps(batch.select_indices(order), protocol=5))
    shards, indices = moved.shard_by_batch_size(
        1,
        sequence_packing_args={
            "max_tokens_per_microbatch": 12,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 1,
        },
    )
    again = BatchedDataDict.from_batches(shards)
    again.reorder_data(indices)
    for row, found in zip(again["input_ids"][:, 0].tolist(), again[SETS], strict=True):
        assert torch.equal(members(found, 70), members(sets[row - 1], 70))
    whole = joined_sets([3, *sets, 2])
    expected = torch.nn.functional.pad(torch.cat([members(each, 70) for each in sets]), (0, 0, 3, 2))
    assert torch.equal(members(whole, 70), expected)
    chosen = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sum(rows) + 4)))), dtype=torch.int64)
    assert torch.equal(members(select_sets(whole, chosen), 70), expected[chosen])


def test_replicas_return_the_same_columns_if_only_rows_of_one_requested_sets():
    row = {"prompt": [1], "tokens": [2], "logprobs": [-0.5], "truncated": False, "weight_version": 0}
    [sets] = random_sets([2], 9, torch.Generator().manual_seed(3))
    requested, other = (to_output([Completion(**row, sampled_sets=own)], has_options=True) for own in (sets, None))
    assert BatchedDataDict.from_batches([requested, other])[SETS] == [sets, None]
    assert SETS not in to_output([Completion(**row)])


def test_only_trained_tokens_of_a_microbatch_get_their_sets():
    sets = [*random_sets([5], 20, torch.Generator().manual_seed(1)), None]
    ids, lengths = torch.ones(2, 6, dtype=torch.int64), torch.tensor([5, 6])
    mask = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]])
    rows = MicrobatchRows(input_ids=ids, lengths=lengths, mask=mask, sets=sets)
    inputs = padded_input(ids, lengths, device=torch.device("cpu"), shift=1, mask=mask).among_sets(rows, shift=1)
    outside = outside_sets(inputs.sets, torch.zeros(3, 20))
    assert torch.equal(outside[:2], ~members(sets[0], 20)[[2, 4]])
    assert not outside[2].any()
    with pytest.raises(DataError, match=r"`sampled_sets` has token id \d+, outside the 5 tokens of the policy"):
        outside_sets(inputs.sets, torch.zeros(3, 5))
