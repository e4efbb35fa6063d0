"""All data sources return the same records for the same rows, and report errors with their location."""

import gzip
import json
import re
import sys
from datetime import date

import pyarrow
import pytest
from datasets import Dataset, DatasetDict, Features, Image

from rl_core.errors import DataError
from rl_train.data.conversations import from_text
from rl_train.data.dataset_config import (
    HuggingFaceDatasetConfig,
    HuggingFacePreferenceDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    ParquetPreferenceDatasetConfig,
    PreferenceDatasetConfig,
)
from rl_train.data.datasets import RecordDataset
from rl_train.data.preferences import PreferenceDataset
from rl_train.data.records import BadRow, bad_row_lines
from rl_train.data.rows import JsonLines

ROWS = [
    {"question": "6*7?", "expected_answer": "42", "level": 1},
    {"question": "2+2?", "expected_answer": "4", "level": 2},
]


class Writer:
    """Writes rows in every format and returns the location of row 1."""

    def __init__(self, folder):
        self.folder = folder

    def jsonl(self, rows):
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": path}, "rows.jsonl:2"

    def parquet(self, rows):
        path = self.folder / "rows.parquet"
        Dataset.from_list(rows).to_parquet(path)
        return {"path": path}, "rows.parquet, row 1"

    def parquet_folder(self, rows):
        (self.folder / "parts").mkdir(exist_ok=True)
        for number, row in enumerate(rows):
            Dataset.from_list([row]).to_parquet(self.folder / "parts" / f"{number}.parquet")
        return {"path": self.folder / "parts"}, "1.parquet, row 0"

    def saved(self, rows):
        Dataset.from_list(rows).save_to_disk(self.folder / "saved")
        return {"path": str(self.folder / "saved")}, "saved, row 1"

    def saved_splits(self, rows):
        DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk(self.folder / "splits")
        return {"path": str(self.folder / "splits"), "split": "train"}, "splits[train], row 1"

    def data_files(self, rows):
        (self.folder / "files").mkdir(exist_ok=True)
        Dataset.from_list(rows).to_parquet(self.folder / "files" / "train.parquet")
        Dataset.from_list(rows[:1]).to_parquet(self.folder / "files" / "test.parquet")
        return {"path": str(self.folder / "files"), "split": "train"}, "files[train], row 1"


CONFIGS = {
    "jsonl": (JsonlDatasetConfig, PreferenceDatasetConfig),
    "parquet": (ParquetDatasetConfig, ParquetPreferenceDatasetConfig),
    "parquet_folder": (ParquetDatasetConfig, ParquetPreferenceDatasetConfig),
    "saved": (HuggingFaceDatasetConfig, HuggingFacePreferenceDatasetConfig),
    "saved_splits": (HuggingFaceDatasetConfig, HuggingFacePreferenceDatasetConfig),
    "data_files": (HuggingFaceDatasetConfig, HuggingFacePreferenceDatasetConfig),
}


@pytest.fixture(params=CONFIGS)
def source(request, tmp_path):
    """Writes rows to one source and returns its config keys and the location of row 1."""

    def write(rows):
        return getattr(Writer(tmp_path), request.param)(rows)

    write.record, write.preference = CONFIGS[request.param]
    return write


def test_every_source_gives_the_same_records(source):
    keys, place = source(ROWS)
    dataset = RecordDataset(source.record(**keys, env_keys=("level",), task_name="math"))
    assert [dataset[index] for index in range(2)] == [
        {
            "messages": [{"role": "user", "content": row["question"]}],
            "extra_env_info": {"expected_answer": row["expected_answer"], "level": row["level"]},
            "task_name": "math",
        }
        for row in ROWS
    ]
    assert dataset[:2] == [dataset[0], dataset[1]]
    assert dataset.row_location(1).endswith(place)


def test_every_source_gives_the_same_conversations_though_tables_fill_messages_with_nulls(source):
    said = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42", "weight": 1}]
    keys, _ = source([{"messages": said}, {"messages": said[:1]}])
    dataset = RecordDataset(source.record(**keys, input_key="messages", output_key=None))
    assert [record["messages"] for record in dataset] == [said, said[:1]]


def test_nested_fields_of_every_source_are_named_with_dots(source):
    row = {
        "task": {"ask": "2+2=", "key": {"answer": 4}},
        "info": {"level": 3},
        "a.b": "whole name",
        "pair": {"good": "4", "bad": "5"},
    }
    keys, place = source([row, {**row, "task": {"ask": "1+1=", "key": {"answer": None}}}])
    named = {"input_key": "task.ask", "env_keys": ["info.level", "a.b", "pair"]}
    dataset = RecordDataset(source.record(**keys, **named, output_key="task.key.answer", on_bad_row="skip"))
    assert dataset.prompt_of(0) == "2+2="
    [record] = dataset
    assert record["messages"] == [{"role": "user", "content": "2+2="}]
    assert record["extra_env_info"] == {"level": 3, "b": "whole name", "pair": row["pair"], "expected_answer": 4}
    [reason] = dataset.reasons
    why = "is None: expected a value" if place.startswith("rows.jsonl") else "is missing"  # a table gives every row its keys
    assert f"{place}: the field 'task.key.answer' (`output_key`) {why}" in reason
    of_pairs = {"prompt_key": "task.ask", "chosen_key": "pair.good", "rejected_key": "pair.bad"}
    pairs = PreferenceDataset(source.preference(**keys, **of_pairs))
    assert [pair["chosen"][0]["content"] for pair in pairs] == ["4", "4"]
    with pytest.raises(ValueError, match=r"x\.level and y\.level under the same name"):
        source.record(**keys, env_keys=["x.level", "y.level"])


@pytest.mark.parametrize(
    ("values", "more"),
    [(["2024-01-02", "2024-02-03"], {}), ([5, "x"], {}), ([5, 5.5], {}), (["a", "b"], {"info": {"day": "2024-01-02", "n": 5}})],
)
def test_values_of_json_files_in_a_folder_are_those_of_the_file(tmp_path, values, more):
    rows = [{"question": "?", "expected_answer": value, **more} for value in values]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"env_keys": list(more)}
    read = [
        [record["extra_env_info"] for record in RecordDataset(config)]
        for config in (
            HuggingFaceDatasetConfig(path=str(tmp_path / "rows"), **keys),
            JsonlDatasetConfig(path=tmp_path / "rows" / "train.jsonl", **keys),
        )
    ]
    assert repr(read[0]) == repr(read[1])


MIXED = {"answer": [5, "x", "7", "1.50", "true", "null", "[1]"], "score": 0.12345678901234}


@pytest.mark.parametrize("form", ["lines", "array"])
def test_texts_that_look_like_json_and_all_digits_are_kept_in_folders_of_json_files(tmp_path, form):
    rows = [{"question": "?", "expected_answer": text, "score": MIXED["score"]} for text in MIXED["answer"]]
    (tmp_path / "rows").mkdir()
    text = json.dumps(rows) if form == "array" else "\n".join(map(json.dumps, rows))
    (tmp_path / "rows" / "train.json").write_text(text)
    dataset = RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path / "rows"), split="train[1:]", env_keys=["score"]))
    found = [record["extra_env_info"] for record in dataset]
    assert found == [{"expected_answer": text, "score": MIXED["score"]} for text in MIXED["answer"][1:]]
    assert dataset.row_location(0).endswith("train.json:2" if form == "lines" else "train.json, row 1")


def test_splits_of_json_files_are_added_and_fields_that_a_row_lacks_are_none(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "level": 1.5}\n\n{"question": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "c", "level": 2}\n')
    dataset = RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path), split="test+train", output_key=None))
    assert [dataset.prompt_of(number) for number in range(3)] == ["c", "a", "b"]
    with pytest.raises(DataError, match=r"train\.jsonl:3: the field 'level' \(`env_keys`\) is None"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path), split="train", output_key=None, env_keys=["level"]))


def test_json_that_is_not_in_lines_is_refused_if_its_values_would_change(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps({"question": "?", "expected_answer": "a", "level": 1.5}, indent=1))
    with pytest.raises(DataError, match=r"do not have one JSON object per line.*jq -c"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path)))


def test_large_integers_are_kept_and_refused_if_their_column_has_other_values(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "?", "expected_answer": 123456789012345678901234567890}\n')
    [record] = RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path)))
    assert record["extra_env_info"]["expected_answer"] == 123456789012345678901234567890
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"question": "?", "expected_answer": "x"}\n')
    with pytest.raises(DataError, match=r"an integer of more than 64 bits\. .*`dataset_name: jsonl`"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path)))
    record = RecordDataset(JsonlDatasetConfig(path=tmp_path / "train.jsonl"))[0]
    assert record["extra_env_info"]["expected_answer"] == 123456789012345678901234567890


def test_values_of_csv_files_in_a_folder_stay_text(tmp_path):
    (tmp_path / "train.csv").write_text("question,expected_answer\na,007\nb,1.50\nc,NA\nd,\n")
    dataset = RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path), on_bad_row="skip"))
    assert [record["extra_env_info"]["expected_answer"] for record in dataset] == ["007", "1.50", "NA"]
    assert dataset.skipped == 1, "an empty value is missing"


def test_a_date_column_of_a_table_is_refused_as_expected_answer(tmp_path):
    Dataset.from_list([{"question": "?", "expected_answer": date(2024, 1, 2)}]).to_parquet(tmp_path / "days.parquet")
    with pytest.raises(DataError, match=r"row 0: .* is datetime\.date\(2024, 1, 2\): an expected answer is a text or a number"):
        RecordDataset(ParquetDatasetConfig(path=tmp_path / "days.parquet"))


def test_every_source_gives_the_same_pairs(source):
    rows = [{"prompt": "2+2=", "chosen": str(n), "rejected": "5"} for n in (4, 3)]
    keys, _ = source(rows)
    pairs = list(PreferenceDataset(source.preference(**keys)))
    assert [(pair["prompt"][0]["content"], pair["chosen"][0]["content"]) for pair in pairs] == [("2+2=", "4"), ("2+2=", "3")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": None, "expected_answer": "4", "level": 1}, "the field 'question' (`input_key`) is None"),
        ({"question": "2+2?", "expected_answer": None, "level": 1}, "the field 'expected_answer' (`output_key`) is None"),
    ],
)
def test_a_bad_row_of_any_source_is_refused_with_its_place_or_skipped_and_counted(source, row, says):
    keys, place = source([ROWS[0], row])
    with pytest.raises(DataError, match=re.escape(f"{place}: {says}")):
        RecordDataset(source.record(**keys))
    skipping = RecordDataset(source.record(**keys, on_bad_row="skip"))
    assert (len(skipping), skipping.skipped) == (1, 1)
    assert f"{place}: {says}" in skipping.reasons[0]


def test_a_missing_column_is_an_error_that_lists_the_columns(source):
    keys, _ = source(ROWS)
    with pytest.raises(DataError, match=r"'problem' \(`input_key`\) is missing: the row has \['expected_answer', 'level', 'qu"):
        RecordDataset(source.record(**keys, input_key="problem"))


def test_a_column_of_another_type_is_refused(source):
    keys, _ = source(ROWS)
    with pytest.raises(DataError, match=r"'level' .* is 1: expected str or list"):
        RecordDataset(source.record(**keys, input_key="level"))


def test_a_dataset_with_only_bad_rows_is_an_error_with_the_first_reason(source):
    keys, _ = source(ROWS)
    with pytest.raises(DataError, match=r"no row to train on \(2 bad rows skipped; the first: .*is missing"):
        RecordDataset(source.record(**keys, input_key="problem", on_bad_row="skip"))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"split": "tset"}, "no split 'tset': it has train, test"),
        ({}, "has the splits train, test"),
        ({"split": "train", "subset": "main"}, "has no subsets"),
        ({"split": "train", "revision": "main"}, "is a folder and has no revisions"),
    ],
)
def test_a_saved_dataset_has_its_splits(tmp_path, keys, says):
    path = Writer(tmp_path).saved_splits(ROWS)[0]["path"]
    with pytest.raises(DataError, match=re.escape(says)):
        RecordDataset(HuggingFaceDatasetConfig(path=path, **keys))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"split": "tset"}, "Unknown split"),
        ({}, "has the splits train, test"),
        ({"split": "train", "subset": "main"}, "'main' not found"),
    ],
)
def test_a_folder_of_data_files_has_splits(tmp_path, keys, says):
    path = Writer(tmp_path).data_files(ROWS)[0]["path"]
    with pytest.raises(DataError, match=says):
        RecordDataset(HuggingFaceDatasetConfig(path=path, **keys))


def test_a_single_table_has_no_split_to_name_and_slices_of_data_files_are_taken(tmp_path):
    path = Writer(tmp_path).saved(ROWS)[0]["path"]
    with pytest.raises(DataError, match="Remove `split`"):
        RecordDataset(HuggingFaceDatasetConfig(path=path, split="train"))
    path = Writer(tmp_path).data_files(ROWS)[0]["path"]
    assert len(RecordDataset(HuggingFaceDatasetConfig(path=path, split="train[:1]"))) == 1


def test_paths_with_glob_characters_are_read_as_they_are_or_refused(tmp_path):
    folder = tmp_path / "run[1]"
    folder.mkdir()
    Dataset.from_list(ROWS).to_parquet(folder / "a*.parquet")
    for path in (folder / "a*.parquet", folder):
        assert len(RecordDataset(ParquetDatasetConfig(path=str(path)))) == len(ROWS)
    with pytest.raises(DataError, match=r"which the datasets library reads as a pattern.*rename the folder"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(folder)))


def test_datasets_saved_with_another_library_format_return_plain_rows(tmp_path):
    Dataset.from_list(ROWS).with_format("numpy").save_to_disk(tmp_path / "saved")
    dataset = RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path / "saved"), env_keys=("level",)))
    assert type(dataset[0]["extra_env_info"]["level"]) is int


def test_a_path_without_a_dataset_is_an_error_with_a_suggestion(tmp_path):
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "wrong.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    for name, says in (("empty", "0 bytes"), ("wrong", "magic bytes")):
        with pytest.raises(DataError, match=rf"{name}\.parquet cannot be loaded: .*{says}"):
            RecordDataset(ParquetDatasetConfig(path=tmp_path / f"{name}.parquet"))
    with pytest.raises(DataError, match="is a file: read it with `dataset_name: parquet` or `jsonl`"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path / "wrong.parquet")))
    Dataset.from_list(ROWS).select([]).to_parquet(tmp_path / "no_rows.parquet")
    with pytest.raises(DataError, match=r"no_rows\.parquet has no row to train on \(it is empty\)"):
        RecordDataset(ParquetDatasetConfig(path=tmp_path / "no_rows.parquet"))
    with pytest.raises(DataError, match="does not exist: give the path of a parquet file"):
        RecordDataset(ParquetDatasetConfig(path=tmp_path / "absent.parquet"))
    with pytest.raises(DataError, match=r"has no \*\.parquet"):
        RecordDataset(ParquetDatasetConfig(path=tmp_path / "empty"))
    with pytest.raises(DataError, match="doesn't contain any data files"):
        RecordDataset(HuggingFaceDatasetConfig(path=str(tmp_path / "empty")))


def test_without_the_library_its_extra_is_named(monkeypatch, tmp_path):
    path = Writer(tmp_path).parquet(ROWS)[0]["path"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'rl-train\[data\]'"):
        RecordDataset(ParquetDatasetConfig(path=path))


def test_invalid_utf8_and_byte_order_marks_are_handled(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b'\r\n\n{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: invalid UTF-8 \(invalid start byte at byte 15"):
        RecordDataset(JsonlDatasetConfig(path=path))
    assert len(RecordDataset(JsonlDatasetConfig(path=path, on_bad_row="skip"))) == 1


@pytest.mark.parametrize("compress", [gzip.compress, lambda content: pyarrow.compress(content, codec="zstd", asbytes=True)])
def test_compressed_files_with_any_name_are_read_and_truncated_ones_are_errors(compress, tmp_path):
    path = tmp_path / "rows.jsonl"
    halves = [json.dumps(row).encode() + b"\n" for row in ROWS]
    path.write_bytes(b"".join(compress(half) for half in halves))
    dataset = RecordDataset(JsonlDatasetConfig(path=path))
    assert [record["extra_env_info"]["expected_answer"] for record in dataset] == ["42", "4"]
    assert dataset.row_location(1).endswith("rows.jsonl:2")
    path.write_bytes(compress(b"".join(halves) * 99)[:-20])
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be decompressed \(.*\): it is corrupt or incomplete"):
        RecordDataset(JsonlDatasetConfig(path=path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"has no row to train on \(it is empty\)"),
        (b"\n\r\n \n", r"has no row to train on \(it is empty\)"),
        (b'[\n{"question": "a"}\n]', r"starts with '\[', so it is one JSON array: write one JSON object per line"),
        (b'{"question": "a", "question": "b"}', r"rows\.jsonl:1: the key 'question' occurs twice in one object"),
        ('{"question": "a"}'.encode("utf-16"), "is encoded in UTF-16: save it as UTF-8"),
        (b"PAR1....", "is a Parquet file: read it with `dataset_name: parquet`"),
        (b"{" * 100_000, r"rows\.jsonl:1: invalid JSON"),
        (b'{"question": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "blank", "an array", "a key twice", "UTF-16", "parquet", "no JSON", "too deep"],
)
def test_files_that_are_not_json_lines_are_errors_with_a_fix(content, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        RecordDataset(JsonlDatasetConfig(path=path))
    with pytest.raises(DataError, match="is a folder: give the path of a JSON Lines file"):
        RecordDataset(JsonlDatasetConfig(path=tmp_path))


def test_locations_of_bad_rows_are_spans_of_numbers_or_those_of_a_users_dataset():
    locations = ("a.md", "a.md", "rows.jsonl:5", "rows.jsonl:3", "rows.jsonl:4", "rows.jsonl:9", "row 0")
    rows = [BadRow(location=location, reason="no text", cause=1) for location in locations]
    assert bad_row_lines(rows) == ["a.md; rows.jsonl:3-5, 9; row 0: no text"]


def test_image_columns_are_not_decoded(tmp_path):
    rows = [{**row, "picture": {"bytes": b"no picture", "path": None}} for row in ROWS]
    features = Features({**Dataset.from_list(ROWS).features, "picture": Image()})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    assert len(RecordDataset(ParquetDatasetConfig(path=tmp_path / "rows.parquet"))) == 2


def test_an_integer_too_long_for_python_is_a_bad_line_with_its_place_in_rows_and_in_arguments(tmp_path):
    longest = "9" * 5000
    path = tmp_path / "long.jsonl"
    path.write_text(f'{{"n": 1}}\n{{"n": {longest}}}\n')
    rows = JsonLines(path)
    assert rows[0] == {"n": 1}
    assert rows.row_location(1) == f"{path}:2"
    with pytest.raises(DataError, match="an integer of more than 4300 digits"):
        rows[1]
    with pytest.raises(DataError, match=r"arguments is the text .*an integer of more than 4300 digits"):
        from_text(f'{{"n": {longest}}}', "arguments")
