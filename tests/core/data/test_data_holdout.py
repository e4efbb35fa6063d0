"""Held-out rows: each row is in one split, determined by its prompt and independent of its position and of other rows."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_train.data.dataset_config import JsonlDatasetConfig, PreferenceDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.data.holdout import held_out
from rl_train.data.preferences import PreferenceDataset


def record(question: str, answer: str | None = None) -> dict:
    said = [] if answer is None else [{"role": "assistant", "content": answer}]
    return {"messages": [{"role": "user", "content": question}, *said], "extra_env_info": {}, "task_name": "t"}


def sides(records, fraction=0.3, seed=0):
    kept, out = held_out(records, fraction=fraction, seed=seed, name="rows")
    return list(kept), list(out)


def questions(records):
    return [item["messages"][0]["content"] for item in records]


MANY = [record(f"question {number}") for number in range(1000)]


@cache
def held_out_of_many(fraction: float, seed: int) -> frozenset[str]:
    return frozenset(questions(sides(MANY, fraction, seed)[1]))


@given(
    # With 60 rows, one split is empty once in a billion cases, which would be an error.
    fraction=st.sampled_from([0.3, 0.5, 0.7]),
    seed=st.integers(0, 5),
    numbers=st.lists(st.integers(0, 999), min_size=60, max_size=200, unique=True),
)
def test_the_holdout_split_is_disjoint_exhaustive_and_independent_of_other_rows(fraction, seed, numbers):
    rows = [MANY[number] for number in numbers]
    kept, out = sides(rows, fraction, seed)
    assert sorted(questions(kept + out)) == sorted(questions(rows))
    assert not set(questions(kept)) & set(questions(out))
    everywhere = held_out_of_many(fraction, seed)
    assert set(questions(out)) == set(questions(rows)) & everywhere
    assert questions(kept) == [question for question in questions(rows) if question not in everywhere]
    assert out == sides(rows[::-1], fraction, seed)[1]


def test_the_share_is_about_the_fraction_and_a_smaller_one_is_the_beginning_of_a_larger():
    out = questions(sides(MANY, 0.3)[1])
    # Binomial: 300 give or take 14.5; four standard deviations.
    assert abs(len(out) - 300) < 58
    assert questions(sides(MANY, 0.1)[1]) == out[: len(sides(MANY, 0.1)[1])]
    assert set(questions(sides(MANY, 0.3, seed=1)[1])) != set(out)


def test_rows_with_the_same_prompt_are_in_the_same_split():
    rows = [record(f"question {number % 50}", f"answer {number}") for number in range(500)]
    kept, out = sides(rows)
    assert not set(questions(kept)) & set(questions(out))


def test_a_prompt_template_and_a_system_message_move_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{number}?"}) + "\n" for number in range(60)))
    plain = RecordDataset(JsonlDatasetConfig(path=path, output_key=None))
    dressed = RecordDataset(JsonlDatasetConfig(path=path, output_key=None, prompt="generic/math", system_prompt="Think."))
    places = [
        [side.row_location(index) for index in range(len(side))]
        for dataset in (plain, dressed)
        for side in held_out(dataset, fraction=0.3, seed=0, name="rows")
    ]
    assert places[:2] == places[2:]
    assert places[0][0].startswith(f"{path}:")


def test_all_pairs_of_one_prompt_are_on_one_side(tmp_path):
    path = tmp_path / "pairs.jsonl"
    ranked = [{"completion": str(n), "rank": n} for n in range(3)]
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "completions": ranked}) + "\n" for n in range(60)))
    pairs = PreferenceDataset(PreferenceDatasetConfig(path=path, pairing="all", system_prompt="Think."))
    kept, out = ({pair["prompt"][-1]["content"] for pair in side} for side in sides(pairs))
    assert len(kept) + len(out) == 60


def test_an_empty_split_and_indistinguishable_rows_are_errors():
    with pytest.raises(DataError, match=r"split\.validation 0\.01 of the 3 records of rows holds out 0 and leaves 3"):
        sides(MANY[:3], 0.01)
    with pytest.raises(DataError, match=r"record 0 cannot be hashed .*not JSON serializable"):
        sides([{"thing": object()}])
