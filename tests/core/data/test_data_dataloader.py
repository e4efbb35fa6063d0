"""The order of the data loader: different in each epoch, and reproducible after a resume."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_train.data import processors
from rl_train.data.dataloader import BatchedDataLoader, epoch_order
from rl_train.data.tasks import TaskChoice

SETTINGS = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 5), "shuffle": st.booleans(), "drop_last": st.booleans(), "seed": st.integers(0, 3)}
)


def loader_of(rows: int, **settings) -> BatchedDataLoader:
    return BatchedDataLoader(list(range(rows)), collate=list, **settings)


@given(rows=st.integers(5, 13), settings=SETTINGS)
def test_a_loader_resumed_at_any_batch_equals_an_uninterrupted_one(rows, settings):
    whole = list(itertools.islice(loader_of(rows, **settings).forever(), 14))
    for stop in range(14):
        interrupted = loader_of(rows, **settings)
        seen = list(itertools.islice(interrupted.forever(), stop))
        resumed = loader_of(rows, **settings)
        resumed.load_state_dict(interrupted.state_dict())
        assert seen + list(itertools.islice(resumed.forever(), 14 - stop)) == whole


@given(rows=st.integers(5, 13), settings=SETTINGS)
def test_an_epoch_has_every_row_once_except_dropped_ones(rows, settings):
    loader = loader_of(rows, **settings)
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert len(batches) == len(loader)
        seen = [row for batch in batches for row in batch]
        assert len(set(seen)) == len(seen)
        assert len(seen) == (rows - rows % settings["batch_size"] if settings["drop_last"] else rows)


@given(rows=st.integers(5, 13), settings=SETTINGS, draws=st.lists(st.integers(0, 7), max_size=6))
def test_rows_drawn_in_any_portions_are_those_of_the_endless_batches(rows, settings, draws):
    batches = itertools.islice(loader_of(rows, **settings).forever(), 60)
    loader = loader_of(rows, **settings)
    portions = [loader.draw(count) for count in draws]
    assert [len(portion) for portion in portions] == draws
    drawn = [row for portion in portions for row in loader.rows_of(portion)]
    assert drawn == [row for batch in batches for row in batch][: len(drawn)]


@given(rows=st.integers(5, 13), settings=SETTINGS, epochs=st.integers(1, 3))
def test_the_draws_of_some_epochs_use_every_row_of_them_and_no_draw_begins_after_them(rows, settings, epochs):
    loader = loader_of(rows, **settings)
    end = epochs * rows
    drawn = [loader.draw(loader.batch_size) for _ in range(loader.draws(epochs))]
    assert drawn[-1][0] < end
    kept = len(loader) * loader.batch_size if settings["drop_last"] else rows
    used = {ordinal for draw in drawn for ordinal in draw}
    assert used >= {epoch * rows + row for epoch in range(epochs) for row in range(kept)}


def test_a_state_at_the_end_of_an_epoch_resumes_to_a_whole_next_one():
    stopped = loader_of(4, batch_size=2)
    list(stopped)
    resumed = loader_of(4, batch_size=2)
    resumed.load_state_dict(stopped.state_dict())
    assert sorted(row for batch in resumed for row in batch) == [0, 1, 2, 3]


def test_iterating_again_after_an_early_exit_continues_where_it_stopped():
    loader = loader_of(6, batch_size=2, shuffle=False)
    assert next(iter(loader)) == [0, 1]
    assert list(loader) == [[2, 3], [4, 5]]


def test_epochs_and_seeds_have_different_orders_and_do_not_use_the_global_rng():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    orders = {tuple(epoch_order(20, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loader_with_default_arguments_returns_batches_of_one_row():
    rows = [{"input_ids": torch.arange(length), "answer": "x", "level": length} for length in (2, 3)]
    batches = list(BatchedDataLoader(rows, shuffle=False))
    assert [batch["input_lengths"].tolist() for batch in batches] == [[2], [3]]
    whole = next(iter(BatchedDataLoader(rows, shuffle=False, batch_size=2)))
    assert whole["input_ids"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert whole["answer"] == ["x", "x"]
    assert whole["level"].tolist() == [2, 3]


@given(rows=st.integers(8, 20), ranks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 3))
def test_the_ranks_together_see_the_rows_of_one_rank_in_every_batch(rows, ranks, seed):
    numbered = [{"number": number, "input_ids": torch.arange(number % 3 + 1)} for number in range(rows)]

    def numbers_by_step(over: int) -> list[list[int]]:
        loader = BatchedDataLoader(numbered, batch_size=4, seed=seed, drop_last=True)
        batches = itertools.islice(loader.forever(), 6)
        shards = ([batch] if over == 1 else batch.shard_by_batch_size(over, batch_size=4) for batch in batches)
        return [[number for shard in step for number in shard["number"].tolist()] for step in shards]

    assert numbers_by_step(ranks) == numbers_by_step(1)


def test_a_state_is_json_and_can_be_resumed_with_another_batch_size():
    stopped = loader_of(12, batch_size=4)
    seen = list(itertools.islice(stopped.forever(), 2))
    resumed = loader_of(12, batch_size=2)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [row for batch in [*seen, *resumed] for row in batch] == epoch_order(12, seed=0, epoch=0)


def test_invalid_loader_arguments_and_states_are_errors():
    with pytest.raises(DataError, match="too few for one batch"):
        loader_of(0)
    with pytest.raises(DataError, match="too few for one batch"):
        loader_of(2, batch_size=3, drop_last=True)
    with pytest.raises(DataError, match="state has 4 rows"):
        loader_of(5).load_state_dict(loader_of(4).state_dict())
    with pytest.raises(DataError, match="rows with the same keys"):
        list(BatchedDataLoader([{"a": 1}, {"b": 1}], batch_size=2))


def test_a_state_of_other_rows_is_rejected_if_both_fingerprints_are_known():
    known, other, unknown = (loader_of(4, fingerprint=name) for name in ("a", "b", None))
    with pytest.raises(DataError, match=r"the rows differ from those of the state: .* start a new run \(`--resume never`\)"):
        other.load_state_dict(known.state_dict())
    for one, two in ((known, unknown), (unknown, known), (known, known)):
        two.load_state_dict(one.state_dict())


def test_a_row_is_tokenized_once_while_its_tokens_are_kept(monkeypatch):
    monkeypatch.setattr(processors, "_TOKENS_KEPT", 570)
    tokenized = []

    def process(record, *, idx):
        tokenized.append(idx)
        return {"message_log": [], "length": 4, "loss_multiplier": 1.0, "idx": idx}

    rows = processors.TokenizedRows([{"messages": []}] * 4, process, tasks=TaskChoice())
    assert [rows[index]["idx"] for index in (0, 1, 0, 1, 2, 1, 0)] == [0, 1, 0, 1, 2, 1, 0]
    assert tokenized == [0, 1, 2, 0]  # two rows of four tokens are kept, each with the memory of 280 more
