"""Data passed in Python: every form gives the records of the config section, and invalid data is an error."""

import gzip
import json

import datasets
import pytest
from datasets import Dataset, DatasetDict
from pydantic import ValidationError

from rl_core.errors import ConfigError, DataError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.assembly.data import read_data
from rl_train.config.schema import DataConfig, SplitConfig
from rl_train.data.dataset_config import JsonlDatasetConfig, PreferenceDatasetConfig
from rl_train.trainers.trainer_data import read_python_data

ASKED, ANSWERED = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
ROWS = {
    "messages": [{"messages": [ASKED, ANSWERED]}],
    "records": [{"messages": [ASKED], "extra_env_info": {"expected_answer": "2"}, "task_name": "math", "id": 7}],
    "completions": [{"prompt": "1+1=", "completion": "2"}],
    "questions": [{"question": "1+1=", "expected_answer": "2", "level": 1}],
    "bare questions": [{"question": "1+1="}],
    "pairs": [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}],
}
KEYS = {
    "messages": {"input_key": "messages", "output_key": None},
    "records": {"record_fn": "record"},
    "completions": {"input_key": "prompt", "response_key": "completion", "output_key": None},
    "questions": {},
    "bare questions": {"output_key": None},
    "pairs": {},
}


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    """The cache of the library is removed with the tests, and is outside the folders of data."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(discover())


def forms(rows: list[dict], folder) -> dict:
    """The rows in every Python form, without a config section."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = Dataset.from_list(rows)
    table.to_parquet(folder / "rows.parquet")
    (folder / "files").mkdir()
    table.to_parquet(folder / "files" / "train.parquet")
    table.save_to_disk(folder / "saved")
    return {
        "a list": rows,
        "a tuple": tuple(rows),
        "a table": table,
        "lines": folder / "rows.jsonl",
        "lines as a text": str(folder / "rows.jsonl"),
        "compressed lines": folder / "rows.jsonl.gz",
        "parquet": folder / "rows.parquet",
        "a folder of files": folder / "files",
        "a saved folder": str(folder / "saved"),
    }


@pytest.mark.parametrize("name", ROWS)
def test_every_python_form_gives_the_records_of_its_config_section(name, registry, tmp_path):
    rows, wants_pairs = ROWS[name], name == "pairs"
    given = forms(rows, tmp_path)
    section = (PreferenceDatasetConfig if wants_pairs else JsonlDatasetConfig)(path=tmp_path / "rows.jsonl", **KEYS[name])
    wanted = list(read_data(DataConfig(train=section), registry)[0].records)
    for form, data in {
        **given,
        "a section": section,
        "a section as a dict": {"dataset_name": section.dataset_name, "path": str(tmp_path / "rows.jsonl"), **KEYS[name]},
        "all data": DataConfig(train=section),
        "all data as a dict": {"train": {"dataset_name": section.dataset_name, "path": tmp_path / "rows.jsonl", **KEYS[name]}},
    }.items():
        data, train, held_out = read_python_data(data, None, registry, wants_pairs=wants_pairs)
        assert list(train.records) == wanted, form
        assert held_out is None


def test_labelled_rows_are_read_for_an_algorithm_that_needs_labels(registry):
    rows = [{"prompt": "1+1=", "completion": "3", "label": False}]
    [record] = read_python_data(rows, None, registry, wants_pairs=False, wants_labels=True)[1].records
    assert (record["completion"][0]["content"], record["label"]) == ("3", False)


def test_records_of_a_dataset_and_of_a_custom_collection_are_accepted(registry):
    sums = ArithmeticDataset({"num_samples": 4})
    assert read_python_data(sums, None, registry, wants_pairs=False)[1].records is sums

    class Rows:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return ROWS["messages"][index]

    assert read_python_data(Rows(), None, registry, wants_pairs=False)[1].records[0]["messages"] == [ASKED, ANSWERED]


def test_the_data_section_splits_mixes_and_sets_defaults_for_all_rows(registry, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "expected_answer": str(n + 1)}) + "\n" for n in range(60)))
    member = {"dataset_name": "jsonl", "path": path}
    given = {"mix": {"a": member, "b": {**member, "weight": 2.0}}, "split": {"validation": 0.2, "seed": 3}, "shuffle": False}
    data, train, held_out = read_python_data(given, None, registry, wants_pairs=False)
    assert isinstance(data.split, SplitConfig)
    assert data.shuffle is False
    assert train.weights == {"a": 1.0, "b": 2.0}
    assert len(train.records) + len(held_out.records) == 120
    short, train, _ = read_python_data({"train_data_path": str(path)}, str(path), registry, wants_pairs=False)
    assert (short.train.dataset_name, len(train.records)) == ("jsonl", 60)


def test_bad_rows_of_the_validation_data_are_counted_with_those_of_the_training_data(registry, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1=", "expected_answer": "2"}\n{\n')
    section = {"dataset_name": "jsonl", "path": path, "on_bad_row": "skip"}
    _, train, held_out = read_python_data(section, section, registry, wants_pairs=False)
    assert held_out.bad_rows is train.bad_rows
    assert train.bad_rows.count == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("absent.jsonl", "dataset absent.jsonl does not exist"),
        ("./absent", "dataset absent does not exist"),
        ("absent.parquet", "dataset absent.parquet does not exist: give the path of a parquet file"),
        ([], r"the dataset has no row to train on \(it is empty\)"),
        ([{"prompt": "1", "completion": "2", "label": False}], "answers with a label, on which KTOTrainer trains"),
        ([{"text": "a"}], r"the dataset, row 0 has \['text'\]: expected `messages`, `prompt` with `completion`, or `question`"),
        (["a"], "the dataset, row 0: it is a str: expected a mapping"),
        ([*ROWS["messages"], {"messages": "a", "tools": 3}], r"the dataset, row 1: `tools` of the result of record is 3"),
        (iter([]), "the dataset is a list_iterator, which has no indexed rows"),
        (
            DatasetDict(train=Dataset.from_list(ROWS["messages"])),
            r"has the splits train: pass one of them, such as \['train'\]",
        ),
    ],
)
def test_invalid_data_is_an_error_that_says_what_to_give(given, says, registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=says):
        read_python_data(given, None, registry, wants_pairs=False)


def test_a_name_that_is_not_a_path_is_a_hub_name(registry, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="dataset nobody/nothing cannot be loaded: Couldn't reach 'nobody/nothing' on the Hub"):
        read_python_data("nobody/nothing", None, registry, wants_pairs=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset_name": "jsonl", "paht": "a"}, r"dataset\.paht: dataset has no key 'paht'\. Did you mean 'path'\?"),
        ({"dataset_name": "jsonl"}, r"dataset\.path is required\..* Allowed: a path"),
        ({"train": {"path": "a"}}, "data.train is .*: expected the section of a dataset, with `dataset_name`"),
        ({"question": ["1+1="]}, r"data\.question: data has no key 'question'"),
        ({"split": {"validation": 0.1}}, "has no training data: set `train` or `mix`"),
    ],
)
def test_an_invalid_section_is_an_error_with_its_key(given, says, registry):
    with pytest.raises(ConfigError, match=says):
        read_python_data(given, None, registry, wants_pairs=False)


@pytest.mark.parametrize("is_model", [True, False])
def test_validation_sets_which_a_trainer_would_ignore_are_refused(is_model, registry, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "expected_answer": "2"}\n')
    rows = {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    given = {"train": rows, "validation_sets": {"hard": rows}}
    if is_model:
        given = DataConfig(train=JsonlDatasetConfig(**rows), validation_sets={"hard": JsonlDatasetConfig(**rows)})
    with pytest.raises(ConfigError, match=r"data\.validation_sets: a Python trainer validates on one dataset"):
        read_python_data(given, None, registry, wants_pairs=False)


def test_held_out_data_is_named_once(registry, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}", "expected_answer": "1"}) + "\n" for n in range(40)))
    given = {"train_data_path": path, "split": {"validation": 0.2}}
    with pytest.raises(ConfigError, match="both set the validation data: remove one"):
        read_python_data(given, path, registry, wants_pairs=False)
    with pytest.raises(ValidationError, match="split and validation both"):
        DataConfig(train_data_path=str(path), val_data_path=str(path), split=SplitConfig(validation=0.2))


def test_a_csv_file_is_named_as_one_and_not_as_broken_json(registry, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,expected_answer\n1+1,2\n")
    with pytest.raises(DataError, match="is a CSV file, but JSON lines are expected"):
        read_python_data(str(path), None, registry, wants_pairs=False)
    with pytest.raises(DataError, match="is a CSV file"):
        read_python_data({"dataset_name": "jsonl", "path": str(path)}, None, registry, wants_pairs=False)


def test_a_csv_file_in_a_separate_folder_is_read(registry, tmp_path):
    (tmp_path / "rows.csv").write_text("question,expected_answer\nOne and one?,two\n")
    section = {"dataset_name": "huggingface", "path": str(tmp_path)}
    _, train, _ = read_python_data(section, None, registry, wants_pairs=False)
    assert train.records[0]["messages"] == [{"role": "user", "content": "One and one?"}]
