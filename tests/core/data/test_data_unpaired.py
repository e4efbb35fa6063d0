"""Answers with a label: from rows of a file, or from pairs, to rows of a batch in which only answers are trained."""

import json
import sys
from types import SimpleNamespace

import pytest
from test_data_preferences import ASKED, GOOD, Letters, said
from test_data_sources import CONFIGS, Writer

from rl_core.errors import DataError
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.dataset_config import PreferenceDatasetConfig
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.processors import unpaired_datum
from rl_train.data.row_sections import OnTooLong
from rl_train.rollouts.batches import TrainingBatches

ROW = {"prompt": "2+2=", "completion": "4", "label": True}


@pytest.fixture
def read(tmp_path):
    def reading(*rows, label_key="label", **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PreferenceDataset(PreferenceDatasetConfig(path=path, label_key=label_key, **keys))

    return reading


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"prompt": [ASKED], "completion": [GOOD], "label": 1},
        {"prompt": "2+2=", "completion": [ASKED, GOOD], "label": "true"},
        {"prompt": [ASKED], "completion": "4", "label": " TRUE "},
        {**ROW, "label": 1.0},
        {**ROW, "label": "1"},
    ],
    ids=["texts", "messages", "a whole conversation", "a text in capitals", "a float", "a digit"],
)
def test_every_form_of_a_labelled_answer_is_the_same_record(read, row):
    assert list(read(row)) == [{"prompt": [ASKED], "completion": [GOOD], "label": True, "task_name": "default"}]


@pytest.mark.parametrize("label", [False, 0, 0.0, "false", "False", "0"])
def test_every_form_of_the_label_of_an_undesirable_answer_is_false(read, label):
    assert read({**ROW, "label": label})[0]["label"] is False


@pytest.mark.parametrize("source", CONFIGS)
def test_every_source_gives_the_same_labelled_answers(source, tmp_path):
    rows = [{"ask": "1?", "info": {"said": "a", "good": True}}, {"ask": "2?", "info": {"said": "b", "good": None}}]
    keys, place = getattr(Writer(tmp_path), source)(rows)
    names = {"prompt_key": "ask", "completion_key": "info.said", "label_key": "info.good"}
    dataset = PreferenceDataset(CONFIGS[source][1](**keys, **names, on_bad_row="skip", system_prompt="Think."))
    assert [(record["prompt"], record["completion"], record["label"]) for record in dataset] == [
        ([said("system", "Think."), said("user", "1?")], [said("assistant", "a")], True)
    ]
    assert dataset.prompt_of(0) == [said("user", "1?")]
    [reason] = dataset.reasons
    assert f"{place}: the field 'info.good' is missing" in reason


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "the field 'label' is missing: the row has ['completion', 'prompt']"),
        ({"prompt": "a", "label": True}, "the field 'completion' is missing"),
        ({"completion": "b", "label": True}, "there is no prompt: the row has ['completion', 'label'] but no 'prompt'"),
        ({**ROW, "label": "good"}, "the field 'label' is 'good': expected true or 1 for a desirable answer, false or 0"),
        ({**ROW, "label": 2}, "the field 'label' is 2: expected true or 1"),
        ({**ROW, "label": 0.5}, "the field 'label' is 0.5: expected true or 1"),
        ({**ROW, "label": [True]}, "the field 'label' is [True]: expected true or 1"),
        ({**ROW, "completion": 4}, "the labelled answer 4 is neither a text nor a list"),
        ({**ROW, "completion": [ASKED]}, "the labelled answer has no assistant message"),
        ({**ROW, "prompt": [said("system", "a")]}, "there is no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "Remove `label_key`, and set `split_pairs: true` or train with dpo"),
    ],
)
def test_a_bad_row_is_named_with_its_line_field_and_remedy(read, row, says):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: ") as caught:
        read(ROW, row)
    assert says in str(caught.value)
    skipping = read(ROW, row, on_bad_row="skip")
    assert (len(skipping), skipping.skipped) == (1, 1)


def test_labelled_answers_read_as_pairs_are_refused_with_the_key_to_set(read):
    with pytest.raises(
        DataError, match=r"so it is one answer with a label\. Set `label_key: label`, and train on such rows with"
    ):
        read(ROW, label_key=None)


def test_split_pairs_makes_two_labelled_answers_of_each_pair(read):
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    ranked = {"prompt": "1?", "completions": [{"completion": name, "rank": rank} for rank, name in enumerate("ab")]}
    dataset = read(pair, ranked, label_key=None, split_pairs=True)
    answers = [(record["prompt"][0]["content"], record["completion"][0]["content"], record["label"]) for record in dataset]
    assert answers == [("2+2=", "4", True), ("2+2=", "5", False), ("1?", "a", True), ("1?", "b", False)]
    assert dataset.config.kind_of_records == "unpaired"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"split_pairs": True, "margin_key": "lead"},
            "answers with a label, so margin_key would have no effect",
        ),
        ({"label_key": "label", "chosen_key": "a", "split_pairs": True}, "so chosen_key, split_pairs would have no effect"),
        ({"completion_key": "said"}, "rows become pairs, as label_key is not set, so completion_key would have no effect"),
    ],
)
def test_keys_of_the_other_kind_of_rows_are_refused(keys, says):
    with pytest.raises(ValueError, match=says):
        PreferenceDatasetConfig(path="rows.jsonl", **keys)


def test_the_result_of_a_function_has_the_same_fields_and_excludes_keys(read, monkeypatch):
    function = SimpleNamespace(made=lambda row: {"prompt": row["q"], "completion": row["a"], "label": row["votes"] > 0})
    monkeypatch.setitem(sys.modules, "votes", function)
    [record] = read({"q": "2+2=", "a": "5", "votes": -3}, record_fn="votes.made")
    assert (record["completion"][0]["content"], record["label"]) == ("5", False)
    with pytest.raises(ValueError, match="record_fn creates the records, so completion_key would have no effect"):
        read(ROW, record_fn="votes.made", completion_key="a")


def datum(completion, label, **options):
    record = {"prompt": [said("user", "ab")], "completion": [said("assistant", completion)], "label": label}
    return unpaired_datum(record, idx=0, tokenizer=Letters(), **options)


def test_only_the_answer_is_trained_and_the_label_is_a_column():
    datums = [datum("xyz", True), datum("w", False), datum("longer", False, max_length=5)]
    loader = BatchedDataLoader(datums, batch_size=3, shuffle=False, collate=list)
    rows = TrainingBatches(loader, pad_token_id=0).next_batch()
    assert rows["token_mask"].tolist()[:2] == [[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]]
    assert rows["desirable"].tolist() == [1.0, 0.0, 0.0]
    assert rows["sample_mask"].tolist() == [1.0, 1.0, 0.0]
    assert rows["input_lengths"].tolist() == [6, 4, 5]


def test_an_undesirable_answer_may_be_empty_and_a_desirable_one_may_not():
    assert datum("", False)["length"] == 3
    with pytest.raises(DataError, match="the desirable answer is empty, so that only its end would be trained"):
        datum("", True)
    with pytest.raises(DataError, match="record 0 has 9 tokens, but 5 are allowed"):
        datum("longer", False, max_length=5, on_too_long=OnTooLong.ERROR)
    with pytest.raises(DataError, match=r"record 0 has \['messages'\] but not .*use a dataset of answers with a label"):
        unpaired_datum({"messages": [ASKED]}, idx=0, tokenizer=Letters())
