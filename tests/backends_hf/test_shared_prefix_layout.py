"""Rows with a shared prefix: one sequence with every token of every row, and microbatches that keep prompts together."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_backends_hf.cpu_attention import share_prefixes
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.shared_prefix import computed_tokens, prefix_groups
from rl_core.errors import DataError


def batch_of(prompts, *, shuffle_seed=None):
    """Rows of prompts, each given as its length and its rows' numbers of further tokens; a negative one cuts the prompt."""
    rows, ids = [], []
    draw = torch.Generator().manual_seed(0)
    for number, (length, more) in enumerate(prompts):
        prompt = torch.randint(1, 50, (length,), generator=draw)
        for extra in more:
            own = torch.randint(50, 99, (max(extra, 0),), generator=draw)
            rows.append(torch.cat([prompt[: length + min(extra, 0)], own]))
            ids.append(number)
    order = list(range(len(rows)))
    if shuffle_seed is not None:
        order = torch.randperm(len(rows), generator=draw.manual_seed(shuffle_seed)).tolist()
    return BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence([rows[row] for row in order], batch_first=True),
        input_lengths=torch.tensor([len(rows[row]) for row in order]),
        prompt_id=torch.tensor([ids[row] for row in order]),
        number=torch.arange(len(rows)),
    )


def prompts(min_rows=1):
    more = st.lists(st.integers(-3, 6), min_size=min_rows, max_size=5)
    return st.lists(st.tuples(st.integers(4, 9), more), min_size=1, max_size=4)


@given(prompts=prompts(), seed=st.integers(0, 9))
def test_every_token_of_every_row_is_in_the_sequence_at_its_position_and_a_prefix_only_once(prompts, seed):
    batch = batch_of(prompts, shuffle_seed=seed)
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    shared = share_prefixes(ids, lengths, batch["prompt_id"])
    is_token = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    assert torch.equal(shared.token_index >= 0, is_token)
    index = shared.token_index[is_token]
    assert torch.equal(shared.input_ids[0, index], ids[is_token])
    assert torch.equal(shared.position_ids[0, index], is_token.nonzero()[:, 1])
    groups = prefix_groups(ids, lengths, batch["prompt_id"])
    assert shared.input_ids.shape[1] == computed_tokens(groups, lengths.tolist()) == len(index.unique())
    for group, segment in zip(groups, shared.segments, strict=True):
        shortest = int(lengths[group.rows].min())
        assert len({tuple(ids[row, : group.prefix].tolist()) for row in group.rows}) == 1
        # A longer common prefix would be one token more in all rows.
        longer = {tuple(ids[row, : group.prefix + 1].tolist()) for row in group.rows}
        assert group.prefix == shortest or len(longer) > 1
        assert torch.equal(segment.own.flatten()[segment.own_tokens], torch.arange(segment.start + segment.prefix, segment.end))


def test_rows_that_only_share_their_prompt_id_share_no_token():
    ids = torch.tensor([[1, 2, 3], [9, 2, 3]])
    (group,) = prefix_groups(ids, torch.tensor([3, 3]), torch.tensor([7, 7]))
    assert (group.rows, group.prefix) == ([0, 1], 0)


BUDGET = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 40}
PLANS = {
    "by_count": {},
    "token_budget": {"dynamic_batching_args": {**BUDGET, "sequence_length_round": 8}},
    "packed": {"sequence_packing_args": {**BUDGET, "algorithm": "first_fit_decreasing"}},
}


@pytest.mark.parametrize("form", PLANS)
@example(prompts=[(4, [0, 0]), (8, [6, 6, 6, 6, -3])], shards=1, unit=1, steps=1)  # the last row has a part of its prompt
@given(prompts=prompts(min_rows=2), shards=st.integers(1, 3), unit=st.sampled_from([1, 2]), steps=st.integers(1, 2))
def test_shards_have_all_rows_once_and_the_same_number_of_microbatches(form, prompts, shards, unit, steps):
    # As many rows as make whole units on every shard in every step: the prompts again and again, as other prompts.
    more = [(length, extra[: len(extra) // unit * unit]) for length, extra in prompts]
    rows = sum(len(extra) for _, extra in more)
    batch = batch_of(more * (shards * unit * steps))
    assert batch.size == rows * shards * unit * steps
    size = batch.size // steps
    parts, order = batch.shard_by_batch_size(shards, size, rows_per_unit=unit, keep_together="prompt_id", **PLANS[form])
    assert sorted(order) == list(range(batch.size))
    whole = BatchedDataDict.from_batches(parts)
    whole.reorder_data(order)
    assert torch.equal(whole["number"], batch["number"])
    for step in range(steps):
        here = [part.get_batch(step) for part in parts]
        numbers = torch.cat([part["number"] for part in here])
        assert sorted(numbers.tolist()) == list(range(step * size, (step + 1) * size))
        if form == "by_count":
            assert len({part.size for part in here}) == 1
            # Rows of a prompt are adjacent: as many runs as prompts, and one more at most for each border of shards.
            prompts_of = torch.cat([part["prompt_id"] for part in here])
            assert len(prompts_of.unique_consecutive()) == len(prompts_of.unique())
            continue
        assert len({len(part.micro_batch_indices[0]) for part in here}) == 1
        for part in here:
            for (start, end), length in zip(part.micro_batch_indices[0], part.micro_batch_lengths[0], strict=True):
                rows_of = part.slice(start, end)
                pairs = rows_of["number"].view(-1, unit)
                assert torch.equal(pairs, pairs[:, :1] + torch.arange(unit))
                shared = share_prefixes(rows_of["input_ids"], rows_of["input_lengths"], rows_of["prompt_id"])
                assert shared.input_ids.shape[1] <= length <= 40


def test_a_prompt_is_in_one_microbatch_if_it_fits_and_in_as_few_as_possible_if_not():
    batch = batch_of([(10, [5, 5, 5]), (10, [5] * 8), (4, [2])], shuffle_seed=1)
    (shard,), _ = batch.shard_by_batch_size(1, keep_together="prompt_id", **PLANS["packed"])
    found = {0: 0, 1: 0, 2: 0}
    for part in shard.make_microbatch_iterator_for_packable_sequences():
        for prompt in part["prompt_id"].unique().tolist():
            found[prompt] += 1
    assert found == {0: 1, 1: 2, 2: 1}


def test_a_prompt_is_split_if_there_are_fewer_prompts_than_shards():
    batch = batch_of([(6, [3, 3, 3, 3])])
    shards, _ = batch.shard_by_batch_size(2, keep_together="prompt_id", **PLANS["packed"])
    assert [shard.size for shard in shards] == [2, 2]


def test_a_row_beyond_the_budget_is_named():
    batch = batch_of([(6, [3, 40])])
    with pytest.raises(DataError, match="row 1 needs 46 tokens, but a microbatch holds at most 40"):
        batch.shard_by_batch_size(1, keep_together="prompt_id", **PLANS["token_budget"])
