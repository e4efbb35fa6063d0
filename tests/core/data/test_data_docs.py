"""The page on data: every example is read from files with the rows shown."""

import json
import re
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.data import read_data
from rl_train.config.loader import load_config
from rl_train.data.processors import conversation_datum
from rl_train.prompts.templates import load_prompt

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
BASE = {"sft": {}, "policy": {"backend": "hf", "model_name": "some/model"}}
SHOWN = [json.loads(line) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files mentioned on the page."""
    [question, verl, messages, completion, begun, _image, tools, *preferences] = SHOWN
    pairs, labelled = preferences[:3], preferences[3:]
    questions = [{**question, "question": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    Dataset.from_list(questions).to_parquet(tmp_path / "train.parquet")
    Dataset.from_list(pairs[1:2]).to_parquet(tmp_path / "ranked.parquet")
    worded = {"question": "How many?", "answer": "Six.\n#### 6"}
    DatasetDict(train=Dataset.from_list([worded])).save_to_disk(tmp_path / "gsm8k")
    DatasetDict(train=Dataset.from_list(questions), test=Dataset.from_list(questions)).save_to_disk(tmp_path / "chats")
    lines = {
        "train": questions,
        "verl": [verl],
        "begun": [begun],
        "chats": [messages],
        "completions": [completion],
        "tools": [tools],
        "labelled": labelled,
        "lines": [{"line": "6*7?|42"}],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for block in blocks("python"):
        if block.startswith("# my_"):
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_prompt_config_of_the_page_is_valid(tmp_path):
    [block] = re.findall(r"``` yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "p.yaml").write_text(block)
    [system, user] = load_prompt(tmp_path / "p.yaml").fill({"problem": "2+2"})
    assert system["content"] == "You are careful."
    assert user["content"].endswith("Solve this problem:\n\n2+2")


def test_the_page_shows_rows_of_every_form():
    assert [sorted(row) for row in SHOWN] == [
        ["expected_answer", "question"],
        ["data_source", "extra_info", "prompt", "reward_model"],
        ["messages"],
        ["completion", "prompt"],
        ["answer", "prompt"],
        ["expected_answer", "images", "question"],
        ["messages", "tools"],
        ["chosen", "prompt", "rejected"],
        ["completions", "prompt"],
        ["completions", "prompt"],
        *[["completion", "label", "prompt"]] * 3,
    ]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: " ".join(block.split())[:60])
def test_every_config_of_the_page_is_valid_and_its_data_is_read(block, folder):
    config = {**BASE, **{key: {**BASE.get(key, {}), **section} for key, section in yaml.safe_load(block).items()}}
    config.setdefault("data", {"train": {"dataset_name": "jsonl", "path": "train.jsonl"}})
    train = config["data"].get("train", {})
    if "preference" in train.get("dataset_name", ""):
        config["kto" if "label_key" in train else "dpo"] = config.pop("sft")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    registry = Registry(discover())
    run = load_config(folder / "config.yaml", registry=registry).run
    train, held_out = read_data(run.data, registry)
    assert len(train.records) > 0
    assert (held_out is not None) == (run.data.split is not None)


def test_the_functions_on_the_page_work_as_described(folder, chat_tokenizer):
    import my_tokens

    record = {"messages": [{"role": "user", "content": "six"}, {"role": "assistant", "content": "seven"}]}
    keys = {"idx": 0, "tokenizer": chat_tokenizer, "max_length": None, "on_too_long": "error"}
    own, core = my_tokens.first_token_only(record, **keys), conversation_datum(record, **keys)
    sums = [sum(float(message["token_loss_mask"].sum()) for message in datum["message_log"]) for datum in (own, core)]
    assert sums[0] == 1 < sums[1]
    [from_python] = [block for block in blocks("python") if "BatchedDataLoader" in block]
    names: dict = {}
    exec(from_python, names)
    assert json.loads(json.dumps(names["state"])) == names["state"]
    assert names["loader"].epoch == 1
