"""Mistakes in the classes and functions that a config names by their path are user errors that name the class and its line."""

import json
import textwrap
from pathlib import Path

import pytest
from later_rules import report_of

from rl_core.errors import ConfigError, DataError, UserError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.data import read_data
from rl_train.config.loader import load_config

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
DATASET = """
    from rl_core.errors import DataError
    from rl_core.interfaces.records import Dataset

    class Good(Dataset):
        def __init__(self, config):
            self.size = getattr(config, "size", 4)

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            messages = [{"role": "user", "content": f"{index}+1="}, {"role": "assistant", "content": str(index + 1)}]
            return {"messages": messages}

    class Fields(Good):
        def __getitem__(self, index):
            return {"question": "1+1=", "expected_answer": "2"}

    class Text(Good):
        def __getitem__(self, index):
            return "1+1="

    class Raising(Good):
        def __getitem__(self, index):
            return {}["prompt"]

    class RaisingInit(Good):
        def __init__(self, config):
            raise OSError("no licence")

    class WithoutConfig(Good):
        def __init__(self):
            pass

    class WithoutLength:
        def __init__(self, config):
            pass

        def __getitem__(self, index):
            return {}

    class BadRow(Good):
        def __getitem__(self, index):
            raise DataError("no answer")
"""
LOSS = """
    from rl_core.interfaces.policy import LossFunction

    class Checked(LossFunction):
        def __init__(self, config):
            if config.exponent > 1:
                raise ValueError("loss_fn.exponent must be at most 1")

        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            return next_token_logprobs.sum(), {}

    class NoLoss:
        pass
"""
FUNCTIONS = """
    import json

    def of_row(row):
        return {"messages": row["mesages"]}

    def in_library(row):
        return json.loads("{")
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in (("their_data", DATASET), ("their_loss", LOSS), ("their_functions", FUNCTIONS)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "expected_answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def load(folder, train, **sections):
    config = {"sft": {}, "policy": {"backend": "hf", "model_name": str(MODEL)}, "data": {"train": train}, **sections}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return load_config(folder / "config.yaml", registry=Registry(discover()))


def line_of(module, text):
    lines = textwrap.dedent(module).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fields", r"Record 0 of the dataset their_data.Fields has \['expected_answer', 'question'\]. A record is a dict with"),
        ("Text", r"Record 0 of the dataset their_data.Text is '1\+1='. A record is a dict with `messages`"),
        ("Raising", rf"raised KeyError at .*their_data.py:{line_of(DATASET, 'return {}[')}: 'prompt'"),
        ("RaisingInit", rf"RaisingInit raised OSError at .*their_data.py:{line_of(DATASET, 'no licence')}: no licence"),
        ("WithoutConfig", r"their_data.WithoutConfig raised TypeError: .*takes 1 positional argument but 2 were given"),
        ("WithoutLength", r"their_data.WithoutLength is not a dataset: it has no __len__"),
    ],
)
def test_a_dataset_class_with_a_mistake_is_a_config_error_that_names_it(name, message, modules):
    run = load(modules, {"dataset_name": f"their_data.{name}"}).run
    with pytest.raises(ConfigError, match=message) as caught:
        read_data(run.data, Registry(discover()))
    assert caught.value.key == "data.train"


def test_a_dataset_class_of_length_0_is_refused_and_a_bad_row_is_left_to_the_loader(modules):
    empty = load(modules, {"dataset_name": "their_data.Good", "size": 0}).run
    with pytest.raises(ConfigError, match=r"their_data.Good is empty"):
        read_data(empty.data, Registry(discover()))
    source, _ = read_data(load(modules, {"dataset_name": "their_data.BadRow"}).run.data, Registry(discover()))
    with pytest.raises(DataError, match="no answer"):
        source.records[0]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize(("name", "kind"), [("of_row", "KeyError"), ("in_library", "JSONDecodeError")])
def test_a_bug_in_a_record_function_names_the_row_and_the_line_of_the_function(name, kind, on_bad_row, modules):
    section = {"dataset_name": "jsonl", "path": "rows.jsonl", "record_fn": f"their_functions.{name}", "on_bad_row": on_bad_row}
    run = load(modules, section).run
    line = line_of(FUNCTIONS, "mesages" if name == "of_row" else "loads")
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{name} raised {kind} at .*their_functions.py:{line}: "):
        read_data(run.data, Registry(discover()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "their_loss.NoLoss"}, "their_loss:NoLoss is not a LossFunction"),
        (
            {"name": "their_loss.Checked", "exponent": 2},
            f"their_loss.py:{line_of(LOSS, 'at most 1')}: loss_fn.exponent must be",
        ),
    ],
)
def test_validate_deep_constructs_a_custom_loss(loss, message, modules):
    loaded = load(modules, {"dataset_name": "their_data.Good"}, loss_fn=loss)
    found = {problem.path: problem.message for problem in report_of(loaded).problems}
    assert message in found["loss_fn",]
