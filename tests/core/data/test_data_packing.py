"""Bin packing compared with capacity and a lower bound, and packed rows compared with plain rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.row_planner import PACKERS, pack, split_to_count
from rl_core.data.shared_prefix import pack_rows
from rl_core.errors import DataError

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=40)
ALGORITHMS = st.sampled_from(sorted(PACKERS))


@given(LENGTHS, ALGORITHMS)
def test_every_packer_places_every_row_once_and_respects_the_capacity(lengths, algorithm):
    bins = pack(lengths, 50, algorithm=algorithm)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= 50 for rows in bins)


@given(LENGTHS, ALGORITHMS, st.integers(0, 6))
def test_bins_are_split_to_any_number_that_there_are_rows_for(lengths, algorithm, more):
    bins = pack(lengths, 50, algorithm=algorithm)
    wanted = min(len(bins) + more, len(lengths))
    bins = split_to_count(bins, lengths, wanted)
    assert len(bins) == wanted
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= 50 for rows in bins)


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """The optimum, by exhaustive search: an independent reference for few rows."""
    best = len(lengths)

    def place(row: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if row == len(lengths):
            best = len(loads)
            return
        for number, load in enumerate(loads):
            if load + lengths[row] <= capacity:
                place(row + 1, (*loads[:number], load + lengths[row], *loads[number + 1 :]))
        place(row + 1, (*loads, lengths[row]))

    place(0, ())
    return best


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_decreasing_packers_stay_within_their_proven_bounds_of_the_optimum(lengths):
    optimum = fewest_bins(lengths, 60)
    assert len(pack(lengths, 60, algorithm="first_fit_decreasing")) <= 11 / 9 * optimum + 6 / 9
    assert len(pack(lengths, 60, algorithm="modified_first_fit_decreasing")) <= 71 / 60 * optimum + 1


def test_modified_first_fit_decreasing_pairs_small_rows_where_first_fit_decreasing_wastes_a_bin():
    # 53 + 23 + 23 and 52 + 26 + 22 fill two bins of 100; first fit puts the 26 next to the 53.
    lengths = [53, 52, 26, 23, 23, 22]
    assert len(pack(lengths, 100, algorithm="MODIFIED_FIRST_FIT_DECREASING")) == 2
    assert len(pack(lengths, 100, algorithm="first_fit_decreasing")) == 3


def test_the_concatenative_packer_keeps_the_order():
    assert pack([4, 6, 1, 9, 10], 10, algorithm="concatenative") == [[0, 1], [2, 3], [4]]


def test_an_unknown_algorithm_and_a_row_that_fits_no_bin_are_refused():
    with pytest.raises(DataError, match="Unknown packing algorithm 'best_fit': choose one of"):
        pack([1], 10, algorithm="best_fit")
    with pytest.raises(DataError, match="row 1 has 11 tokens, but a bin holds at most 10"):
        pack([1, 11], 10, algorithm="concatenative")


ROWS = st.lists(st.integers(0, 7), min_size=1, max_size=5)


def rows_of(lengths: list[int], padding: int = 0) -> dict[str, torch.Tensor]:
    length = torch.tensor(lengths)
    tokens = torch.randint(1, 99, (len(lengths), 8))
    tokens[torch.arange(8) >= length.unsqueeze(1)] = padding
    return {"input_ids": tokens, "input_lengths": length}


@given(ROWS, st.sampled_from([1, 2, 4]))
def test_each_packed_row_starts_at_a_boundary_with_position_zero(lengths, multiple):
    data = rows_of(lengths)
    packed = pack_rows(data, pad_multiple=multiple)
    padded = [-(-length // multiple) * multiple for length in lengths]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [sum(padded[:row]) for row in range(len(lengths) + 1)]
    assert packed.position_ids[0].tolist() == [place for length in padded for place in range(length)]
    assert packed.max_seqlen == max(padded)
    expected = [row if place < lengths[row] else -1 for row, length in enumerate(padded) for place in range(length)]
    assert packed.row_index.tolist() == expected
    assert packed.input_ids[0][packed.row_index >= 0].tolist() == [
        token for row, length in zip(data["input_ids"].tolist(), lengths, strict=True) for token in row[:length]
    ]
    assert packed.input_ids[0][packed.row_index < 0].tolist() == [0] * (sum(padded) - sum(lengths))


@given(ROWS, st.integers(1, 99))
def test_padding_values_never_enter_a_pack(lengths, garbage):
    torch.manual_seed(0)
    clean = rows_of(lengths)
    dirty = dict(clean)
    beyond = torch.arange(8) >= clean["input_lengths"].unsqueeze(1)
    dirty["input_ids"] = torch.where(beyond, garbage, clean["input_ids"])
    one, other = pack_rows(clean, pad_multiple=4), pack_rows(dirty, pad_multiple=4)
    assert torch.equal(one.input_ids, other.input_ids)


def test_a_pack_refuses_lengths_beyond_its_rows():
    with pytest.raises(DataError, match="but 'input_ids' has 8 tokens"):
        pack_rows({**rows_of([1]), "input_lengths": torch.tensor([9])})


@pytest.mark.parametrize("algorithm", [7, None, ["concatenative"]])
def test_a_packing_algorithm_of_a_wrong_type_is_refused_with_the_known_names(algorithm):
    with pytest.raises(DataError, match=r"Unknown packing algorithm .*: choose one of"):
        pack([1], 50, algorithm=algorithm)
