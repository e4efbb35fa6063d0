"""Preference data: from lines of a file to pairs of rows in which only answers are trained."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.dataset_config import PreferenceDatasetConfig
from rl_train.data.preferences import PreferenceDataset, pairs_from_row
from rl_train.data.processors import preference_datum
from rl_train.data.row_sections import OnTooLong
from rl_train.rollouts.batches import PreferenceBatches


@pytest.fixture
def read(tmp_path):
    def reading(*rows, **config):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return PreferenceDataset(PreferenceDatasetConfig(path=path, **config))

    return reading


def said(role, content):
    return {"role": role, "content": content}


ASKED, GOOD, BAD = said("user", "2+2="), said("assistant", "4"), said("assistant", "5")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "2+2=", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "2+2=", "completions": [{"completion": "5", "rank": 1}, {"completion": [GOOD], "rank": 0}]},
    ],
    ids=["texts", "messages", "whole conversations", "no prompt", "ranked"],
)
def test_every_form_of_a_pair_is_the_same_record(read, row):
    [record] = read(row)
    assert record == {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "task_name": "default"}


def test_a_margin_is_on_both_rows_of_its_pair_and_zero_elsewhere(read):
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    records = read({**row, "lead": 1.5}, {**row, "margin": 3.0}, row, margin_key="lead")
    assert [record.get("margin") for record in records] == [1.5, None, None]
    rows = batches(*(preference_datum(record, idx=0, tokenizer=Letters()) for record in records))
    assert rows["margins"].tolist() == [1.5, 1.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("margin", ["large", True, -1.0, float("inf")])
def test_an_invalid_margin_is_an_error_with_its_row(read, margin):
    with pytest.raises(DataError, match=r"'margin' is .*a number of at least 0"):
        read({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": margin})


def test_several_ranks_are_one_pair_or_all_of_them(read):
    row = {"context": "2+2=", "completions": [{"completion": str(n), "rank": abs(n - 4)} for n in (3, 4, 5, 9)]}
    [record] = read(row, prompt_key="context")
    assert (record["chosen"][0]["content"], record["rejected"][0]["content"]) == ("4", "9")
    pairs = [(r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in read(row, prompt_key="context", pairing="all")]
    assert pairs == [("4", "3"), ("4", "5"), ("4", "9"), ("3", "9"), ("5", "9")]


def test_the_highest_score_is_best_and_ties_go_to_the_first(read):
    listed = [{"completion": name, "score": score} for name, score in (("a", 1), ("b", 2.5), ("c", 2.5), ("d", 1))]
    [record] = read({"prompt": "?", "completions": listed})
    assert (record["chosen"][0]["content"], record["rejected"][0]["content"]) == ("b", "d")
    every = read({"prompt": "?", "completions": listed}, pairing="all")
    pairs = [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in every]
    assert pairs == [("b", "a"), ("b", "d"), ("c", "a"), ("c", "d")]


@given(worths=st.lists(st.integers(0, 4), min_size=2, max_size=7))
def test_ranked_answers_become_all_pairs_of_different_rank(worths):
    listed = [{"completion": str(number), "rank": worth} for number, worth in enumerate(worths)]
    row = {"prompt": "?", "completions": listed}
    config = PreferenceDatasetConfig(path="rows.jsonl", pairing="all")
    expected = {(a, b) for a, x in enumerate(worths) for b, y in enumerate(worths) if x < y}
    if not expected:
        with pytest.raises(DataError, match="so there is no preference"):
            pairs_from_row(row, config)
        return
    made = [(int(r["chosen"][0]["content"]), int(r["rejected"][0]["content"])) for r in pairs_from_row(row, config)]
    assert len(made) == len(expected)
    assert set(made) == expected
    [best] = pairs_from_row(row, PreferenceDatasetConfig(path="rows.jsonl"))
    assert worths[int(best["chosen"][0]["content"])] == min(worths)
    assert worths[int(best["rejected"][0]["content"])] == max(worths)


def test_a_system_prompt_opens_conversations_that_have_none(read):
    [record] = read({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, system_prompt="Sums.")
    assert record["prompt"] == [said("system", "Sums."), ASKED]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "so there is no preference"),
        ({"prompt": "a", "chosen": 4, "rejected": "b"}, "better answer 4 is neither a text nor a list"),
        ({"chosen": "4", "rejected": "5"}, "there is no prompt"),
        ({"prompt": "a", "chosen": [ASKED], "rejected": "b"}, "better answer has no assistant message"),
        ({"prompt": "a", "chosen": [{"text": "b"}], "rejected": "b"}, "message 0 of the better answer"),
        ({"prompt": "a", "completions": ["b", "c"]}, "expected a list of {completion, rank}"),
        ({"prompt": "a", "completions": [{"completion": "b", "rank": 0}]}, "all have the same rank"),
        ({"prompt": "a", "completions": [{"completion": x, "score": 1.0} for x in "bc"]}, "all have the same score"),
        ({"prompt": "a", "completions": []}, "all have the same rank"),
        ({"prompt": "a", "completions": "b"}, "expected a list of {completion, rank} or"),
        (
            {"prompt": "a", "completions": [{"completion": "b", "rank": "first"}]},
            "answer 0 of the field 'completions' has the rank",
        ),
        ({"prompt": "a", "completions": [{"completion": "b", "rank": True}]}, "rank True: expected a number"),
        ({"prompt": "a", "completions": [{"completion": "b", "score": float("nan")}]}, "score nan: expected a number"),
        ({"prompt": "a", "completions": [{"completion": "b", "rank": 0}, {"completion": "c", "score": 1}]}, "others a score"),
        (
            {"prompt": "a", "completions": [{"completion": "b", "rank": 0, "score": 1}]},
            "expected a list of {completion, rank} or",
        ),
        ({"prompt": [{"role": "system", "content": "a"}], "chosen": "b", "rejected": "c"}, "there is no prompt"),
        ("[1]", "expected a JSON object"),
        ("{", "invalid JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_line(read, row, says):
    good = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: ") as caught:
        read(good, row)
    assert says in str(caught.value)
    skipping = read(good, row, on_bad_row="skip")
    assert (len(skipping), skipping.skipped) == (1, 1)


def test_a_file_without_pairs_is_refused(read, tmp_path):
    with pytest.raises(DataError, match="no preference to train on"):
        read("")
    with pytest.raises(DataError, match="does not exist"):
        PreferenceDataset(PreferenceDatasetConfig(path=tmp_path / "absent.jsonl"))


class Letters:
    """One token per letter; no template, EOS 1."""

    chat_template = None
    bos_token_id = None
    eos_token_id = 1
    pad_token_id = 0

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(letter) for letter in text]}


def datum(prompt, chosen, rejected, **options):
    record = {
        "prompt": [said("user", prompt)],
        "chosen": [said("assistant", chosen)],
        "rejected": [said("assistant", rejected)],
    }
    return preference_datum(record, idx=0, tokenizer=Letters(), **options)


def batches(*datums):
    loader = BatchedDataLoader(datums, batch_size=len(datums), shuffle=False, collate=list)
    return PreferenceBatches(loader, pad_token_id=0).next_batch()


def test_rows_of_a_pair_are_adjacent_and_only_answers_are_trained():
    rows = batches(datum("ab", "xyz", "x"), datum("c", "d", "ef"))
    texts = [
        "".join(chr(t) for t in ids[: n - 1]) for ids, n in zip(rows["input_ids"].tolist(), rows["input_lengths"], strict=True)
    ]
    assert texts == ["abxyz", "abx", "cd", "cef"]
    trained = [
        "".join(chr(t) if t > 1 else "." for t, m in zip(ids, mask, strict=True) if m)
        for ids, mask in zip(rows["input_ids"].tolist(), rows["token_mask"].tolist(), strict=True)
    ]
    assert trained == ["xyz.", "x.", "d.", "ef."]
    assert rows["prompt_id"].tolist() == [0, 0, 1, 1]
    assert rows["sample_mask"].tolist() == [1.0] * 4


def test_an_earlier_answer_within_the_prompt_is_not_trained():
    record = {"prompt": [said("user", "a"), said("assistant", "b"), said("user", "c")], "chosen": [said("assistant", "d")]}
    pair = preference_datum({**record, "rejected": [said("assistant", "e")]}, idx=0, tokenizer=Letters())
    rows = batches(pair)
    assert rows["token_mask"].sum(-1).tolist() == [2.0, 2.0]


def test_a_pair_with_a_too_long_answer_is_dropped():
    rows = batches(datum("a", "b" * 9, "c", max_length=5), datum("a", "b", "c", max_length=5))
    assert rows["sample_mask"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert rows["input_lengths"].tolist() == [5, 3, 3, 3]
    with pytest.raises(DataError, match="5 are allowed"):
        datum("a", "b" * 9, "c", max_length=5, on_too_long=OnTooLong.ERROR)


def test_records_of_another_kind_are_refused_with_the_remedy():
    with pytest.raises(DataError, match="dataset_name: preference"):
        preference_datum({"messages": [ASKED, GOOD], "task_name": "t"}, idx=3, tokenizer=Letters())


@st.composite
def shardings(draw):
    shards, unit = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch_size = shards * unit * draw(st.integers(1, 4))
    rows = batch_size * draw(st.integers(1, 2))
    return draw(st.lists(st.integers(1, 10), min_size=rows, max_size=rows)), shards, unit, batch_size


@given(
    case=shardings(), packs=st.booleans(), algorithm=st.sampled_from(["first_fit_decreasing", "modified_first_fit_decreasing"])
)
def test_rows_that_are_read_together_stay_together_in_every_plan(case, packs, algorithm):
    lengths, shards, unit, batch_size = case
    data = BatchedDataDict(
        {
            "input_ids": torch.arange(len(lengths)).unsqueeze(1).expand(-1, 10).contiguous(),
            "input_lengths": torch.tensor(lengths),
        }
    )
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    plan = {"max_tokens_per_microbatch": 40, "algorithm": algorithm, **keys} if packs else None
    budget = None if packs else {"max_tokens_per_microbatch": 40, "sequence_length_round": 2, **keys}
    parts, order = data.shard_by_batch_size(
        shards, batch_size, dynamic_batching_args=budget, sequence_packing_args=plan, rows_per_unit=unit
    )
    assert sorted(order) == list(range(len(lengths)))
    for shard in parts:
        iterate = (
            shard.make_microbatch_iterator_for_packable_sequences()
            if packs
            else shard.make_microbatch_iterator_with_dynamic_shapes()
        )
        for microbatch in iterate:
            rows = microbatch["input_ids"][:, 0].tolist()
            for start in range(0, len(rows), unit):
                assert rows[start] % unit == 0
                assert rows[start : start + unit] == list(range(rows[start], rows[start] + unit))
            size = sum(microbatch["input_lengths"].tolist()) if packs else len(rows) * microbatch["input_ids"].shape[1]
            assert size <= 40


def test_a_plan_that_would_cut_a_unit_is_refused():
    data = BatchedDataDict({"input_ids": torch.ones(6, 2), "input_lengths": torch.full((6,), 2)})
    args = {
        "max_tokens_per_microbatch": 8,
        "sequence_length_round": 1,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    with pytest.raises(DataError, match="multiples of 2"):
        data.shard_by_batch_size(1, 3, dynamic_batching_args=args, rows_per_unit=2)
    with pytest.raises(DataError, match="each of the 3 rows that are read together"):
        data.shard_by_batch_size(1, 6, dynamic_batching_args={**args, "max_tokens_per_microbatch": 5}, rows_per_unit=3)
