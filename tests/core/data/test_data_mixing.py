"""Mixtures: proportions at every position, no repetition before all rows were seen, and resuming from JSON."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_train.data.arrow_rows import ConcatDataset
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.mixing import Mixture

NAMES = "abcd"
# No share is so small that it is less than one row of an epoch: with four members at least 20 rows by 0.5 / 6.5.
MEMBERS = st.lists(st.tuples(st.integers(5, 40), st.floats(0.5, 2.0)), min_size=1, max_size=4)


def mixture_of(members) -> Mixture:
    return Mixture(
        sizes={name: size for name, (size, _) in zip(NAMES, members, strict=False)},
        weights={name: weight for name, (_, weight) in zip(NAMES, members, strict=False)},
    )


def rows_of(mixture: Mixture) -> ConcatDataset:
    return ConcatDataset([[(name, row) for row in range(size)] for name, size in mixture.sizes.items()])


def loader_of(mixture: Mixture, **settings) -> BatchedDataLoader:
    return BatchedDataLoader(rows_of(mixture), collate=list, mixture=mixture, **settings)


@given(members=MEMBERS, seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_prefix_of_an_epoch_has_the_datasets_in_proportion(members, seed, shuffle):
    mixture = mixture_of(members)
    rows, total = rows_of(mixture), sum(size for size, _ in members)
    order = mixture.order(seed=seed, epoch=2, shuffle=shuffle)
    assert len(order) == total
    share = {name: weight / sum(w for _, w in members) for name, (_, weight) in zip(NAMES, members, strict=False)}
    counts = Counter(rows[row][0] for row in order)
    assert all(abs(counts[name] - share[name] * total) < 1 for name in mixture.sizes)
    seen = Counter()
    for place, row in enumerate(order, start=1):
        seen[rows[row][0]] += 1
        for name, count in counts.items():
            due = place * count / total
            assert abs(seen[name] - due) <= (1 + len(members) * count / total) / 2 + 1e-9


def test_rows_are_drawn_in_proportion_to_dataset_weights():
    mixture = Mixture(sizes={"math": 50, "chat": 950}, weights={"math": 0.7, "chat": 0.3})
    loader = loader_of(mixture, batch_size=10, drop_last=True)
    batches = list(itertools.islice(loader.forever(), 300))
    per_batch = [Counter(name for name, _ in batch)["math"] for batch in batches]
    assert sum(per_batch) == 2100
    assert set(per_batch) == {7}


@given(members=MEMBERS, seed=st.integers(0, 3), shuffle=st.booleans())
def test_a_member_shows_all_of_its_rows_before_it_repeats_one_over_epochs(members, seed, shuffle):
    mixture = mixture_of(members)
    rows = rows_of(mixture)
    seen = [rows[row] for epoch in range(4) for row in mixture.order(seed=seed, epoch=epoch, shuffle=shuffle)]
    for name, size in mixture.sizes.items():
        own = [row for member, row in seen if member == name]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))
        if not shuffle:
            assert own == [place % size for place in range(len(own))]


@given(members=MEMBERS, stop=st.integers(0, 20), size=st.integers(1, 3))
def test_a_mixture_resumed_from_json_equals_an_uninterrupted_one(members, stop, size):
    mixture = mixture_of(members)
    whole = list(itertools.islice(loader_of(mixture, batch_size=size).forever(), 30))
    interrupted = loader_of(mixture, batch_size=size)
    seen = list(itertools.islice(interrupted.forever(), stop))
    resumed = loader_of(mixture_of(members), batch_size=size)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert seen + list(itertools.islice(resumed.forever(), 30 - stop)) == whole


def test_row_order_of_a_dataset_does_not_depend_on_other_datasets_of_the_mixture():
    sizes, weights = {"a": 9, "b": 5}, {"a": 1.0, "b": 1.0}
    one, other = Mixture(sizes=sizes, weights=weights), Mixture(sizes={"b": 5, "a": 9}, weights=weights)

    def own(mixture, name):
        rows = rows_of(mixture)
        return [rows[row][1] for row in mixture.order(seed=1, epoch=0, shuffle=True) if rows[row][0] == name]

    assert own(one, "a") == own(other, "a")
    assert own(one, "a")[:5] != own(one, "b")[:5]


def test_weights_like_the_sizes_show_every_row_once_an_epoch():
    mixture = Mixture(sizes={"a": 7, "b": 3}, weights={"a": 7, "b": 3})
    assert sorted(mixture.order(seed=0, epoch=0, shuffle=False)) == list(range(10))


def test_states_of_another_mixture_and_datasets_that_are_never_drawn_are_errors():
    state = loader_of(mixture_of([(5, 1.0), (5, 1.0)])).state_dict()
    with pytest.raises(DataError, match=r"the state has the mixture \{'a': \[5, 5\]"):
        loader_of(mixture_of([(5, 1.0), (5, 3.0)])).load_state_dict(state)
    with pytest.raises(DataError, match="the state has the mixture"):
        BatchedDataLoader(list(range(10))).load_state_dict(state)
    with pytest.raises(DataError, match="it would get none of"):
        mixture_of([(5, 1.0), (5, 0.001)])
    with pytest.raises(DataError, match=r"data\.mix\.b has no rows"):
        mixture_of([(5, 1.0), (0, 1.0)])
    with pytest.raises(DataError, match="mixture has 10 rows, but the dataset has 3"):
        BatchedDataLoader([1, 2, 3], mixture=mixture_of([(5, 1.0), (5, 1.0)]))
