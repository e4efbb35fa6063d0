"""Data formats of users: parquet, a saved dataset in a mixture with a split, ranked completions; and errors in each."""

import json
import random
import sys

import pytest
from datasets import Dataset, DatasetDict
from e2e_runs import MEASURED, MODEL, merged

from rl_core.errors import UserError
from rl_train.launch.train import train
from rlcore_cli.main import main

BASE = {
    "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
ANSWERED = {"response_key": "answer", "output_key": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("data")
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(120)]
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    Dataset.from_list(rows).to_parquet(folder / "sums.parquet")
    Dataset.from_list([]).to_parquet(folder / "empty.parquet")
    DatasetDict(train=Dataset.from_list(rows[:80]), test=Dataset.from_list(rows[80:])).save_to_disk(folder / "sums")
    said = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows[80:]
    ]
    lines = [*(json.dumps({"messages": messages}) for messages in said), '{"messages": "no list"', '{"messages": []}']
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    ranked = [
        {
            "prompt": row["question"],
            "completions": [{"completion": str(int(row["answer"]) + d), "score": -d} for d in (1, 0, 9)],
        }
        for row in rows
    ]
    Dataset.from_list(ranked).to_parquet(folder / "ranked.parquet")
    return folder


def mixture(data) -> dict:
    saved = {"dataset_name": "huggingface", "path": str(data / "sums"), "split": "train", "weight": 0.7, **ANSWERED}
    chats = {"dataset_name": "jsonl", "path": str(data / "chats.jsonl"), "input_key": "messages", "output_key": None}
    return {
        "sft": {"max_num_steps": 4, "global_batch_size": 10, "val_at_end": True},
        "data": {
            "mix": {"saved": saved, "chats": {**chats, "on_bad_row": "skip", "weight": 0.3}},
            "split": {"validation": 0.2, "seed": 1},
        },
    }


def configs(data) -> dict:
    return {
        "parquet": {
            "sft": {"max_num_steps": 2, "global_batch_size": 16},
            "data": {"train": {"dataset_name": "parquet", "path": str(data / "sums.parquet"), **ANSWERED}},
        },
        "mixture": mixture(data),
        "ranked": {
            "dpo": {"max_num_steps": 2, "global_batch_size": 8},
            "data": {"train": {"dataset_name": "preference_parquet", "path": str(data / "ranked.parquet"), "pairing": "all"}},
        },
    }


def written(folder, config, changes=None):
    path = folder / "run.yaml"
    path.write_text(json.dumps(merged(merged({**BASE, "logger": {"log_dir": str(folder / "runs")}}, config), changes or {})))
    return path


def trained(folder, config, **options) -> list[dict]:
    finished = train(written(folder, config), console=False, **options)
    steps = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in step.items() if not k.endswith(MEASURED)} for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parquet", "mixture", "ranked"])
def test_a_small_config_trains(name, data, tmp_path):
    steps = trained(tmp_path, configs(data)[name], resume="never")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all(step["loss"] > 0 for step in steps)
    if name == "mixture":
        assert [step.get("data/bad_rows") for step in steps] == [2, None, None, None]
        assert steps[-1]["validation/loss"] > 0
        log = next((tmp_path / "runs").rglob("driver.log")).read_text()
        assert "chats.jsonl:41: invalid JSON" in log
        assert "2 bad rows of mix.chats are skipped" in log


@pytest.mark.slow
def test_a_resumed_mixture_equals_an_uninterrupted_one(data, tmp_path):
    config = merged(mixture(data), {"checkpointing": {"enabled": True, "save_period": 2}})
    (tmp_path / "whole").mkdir()
    whole = trained(tmp_path / "whole", config, resume="never")
    trained(tmp_path, merged(config, {"sft": {"max_num_steps": 2}}), resume="never")
    resumed = trained(tmp_path, config)
    assert [{k: v for k, v in s.items() if not k.startswith("validation/")} for s in resumed[:2]] == [
        {k: v for k, v in s.items() if not k.startswith("validation/")} for s in whole[:2]
    ]
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole]
    assert resumed[-1]["validation/loss"] == whole[-1]["validation/loss"]


def test_too_long_rows_are_counted_when_dropped(data, tmp_path):
    config = merged(configs(data)["parquet"], {"policy": {"max_total_sequence_length": 9}, "data": {"on_long_prompt": "drop"}})
    steps = trained(tmp_path, config, resume="never")
    assert steps[0]["data/dropped_rows"] > 0


@pytest.mark.parametrize(
    ("name", "changes", "command", "says"),
    [
        ("parquet", {"data": {"train": {"response_key": "reply"}}}, "train", "sums.parquet, row 0: the field 'reply'"),
        ("parquet", {"data": {"train": {"path": "{data}/empty.parquet"}}}, "train", "has no row to train on (it is empty)"),
        ("parquet", {"data": {"train": {"path": "absent.parquet"}}}, "validate", "'absent.parquet' does not exist in"),
        ("parquet", {"data": {"train": {"weight": 2}}}, "validate", "weights apply only to the datasets of mix"),
        ("parquet", {"data": {"train": {"record_fn": "gsm8k"}}}, "validate", "output_key, response_key would have no effect"),
        ("parquet", {"dpo": {}, "sft": None}, "validate", "parquet has prompts or conversations, but dpo needs pairs"),
        ("mixture", {"data": {"mix": {"saved": {"split": "tset"}}}}, "train", "has no split 'tset': it has train, test"),
        ("mixture", {"data": {"mix": {"chats": {"on_bad_row": "error"}}}}, "train", "chats.jsonl:41: invalid JSON"),
        ("mixture", {"data": {"mix": {"saved": {"wieght": 1}}}}, "validate", "Did you mean 'weight'?"),
        ("mixture", {"data": {"mix": {"saved": {"dataset_name": "parket"}}}}, "validate", "Did you mean 'parquet'?"),
        ("mixture", {"data": {"mix": {"saved": {"weight": 1e-6}}}}, "train", "it would get none of"),
        ("mixture", {"data": {"split": {"validation": 2}}}, "validate", "less than 1.0; found 2"),
        ("ranked", {"data": {"train": {"completions_key": "answers"}}}, "train", "the field 'chosen' is missing"),
        ("ranked", {"sft": {}, "dpo": None}, "validate", "but sft needs prompts or conversations"),
        ("ranked", {"data": {"prompt": {"prompt_config": "generic/math"}}}, "validate", "has no template"),
    ],
)
def test_an_error_in_the_data_exits_with_code_2(name, changes, command, says, data, tmp_path, monkeypatch, capsys):
    changes = json.loads(json.dumps(changes).replace("{data}", str(data)))
    path = written(tmp_path, configs(data)[name], changes)
    monkeypatch.setattr(sys, "argv", ["rlcore", command, str(path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("template.jinja", "the file was read"),
        ("{{ raise_exception('the text was read') }}", "the text was read"),
        ("absent.jinja", "policy.tokenizer.chat_template: 'absent.jinja' does not exist in "),
        ("{% for m in messages %}", "Unexpected end of template"),
    ],
)
def test_a_chat_template_is_a_file_next_to_the_config_or_inline_text(template, says, data, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ raise_exception('the file was read') }}")
    changes = {"policy": {"tokenizer": {"chat_template": template}}}
    with pytest.raises(UserError) as caught:
        train(written(tmp_path, configs(data)["parquet"], changes), resume="never", console=False)
    assert says in str(caught.value)
