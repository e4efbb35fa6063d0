"""Datasets by their hub name: downloaded from a hub on the loopback device, and errors."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from loopback_hub import Repository, serving

from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DataError, UserError

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/train-*}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*}
  - {split: test, path: hard/test-*}
---
# Sums
"""


def sums(first: int, count: int) -> list[dict]:
    return [{"question": f"{first}+{n}=", "answer": str(first + n)} for n in range(count)]


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def hub():
    tables = {
        "README.md": CARD.encode(),
        "easy/train-00000-of-00001.parquet": parquet(sums(1, 8)),
        "hard/train-00000-of-00001.parquet": parquet(sums(20, 4)),
        "hard/test-00000-of-00001.parquet": parquet(sums(50, 2)),
    }
    repositories = {
        "someone/sums": Repository({"main": tables}),
        "someone/lines": Repository({"main": {"train.jsonl": lines(sums(1, 8))}, "v1": {"train.jsonl": lines(sums(3, 2))}}),
    }
    with serving(repositories) as served:
        yield served


def environment(hub, home: Path, **more: str) -> dict[str, str]:
    """Environment of a process that uses only this hub and cache; the library reads it once, at import."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HUB_DISABLE_TELEMETRY": "1", **own, **more}


LOAD = """
import json, sys
from rl_train.data.dataset_config import HuggingFaceDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_core.errors import UserError
for keys in json.loads(sys.argv[1]):
    try:
        dataset = RecordDataset(HuggingFaceDatasetConfig(output_key=None, response_key="answer", **keys))
        found = [[m["content"] for m in dataset[0]["messages"]], len(dataset), dataset.row_location(0)]
    except UserError as error:
        found = str(error)
    print(json.dumps(found))
"""


def loaded(asked: list[dict], env: dict[str, str]) -> list:
    """The result of a separate process for each config."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(asked)], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_hub_files_are_downloaded_by_subset_split_and_revision_and_errors_name_their_key(hub, tmp_path):
    asked = {
        "lines": {"path": "someone/lines"},
        "lines of another revision": {"path": "someone/lines", "revision": "v1"},
        "subset": {"path": "someone/sums", "subset": "easy"},
        "split of a subset": {"path": "someone/sums", "subset": "hard", "split": "test"},
        "no subset": {"path": "someone/sums"},
        "another subset": {"path": "someone/sums", "subset": "harder"},
        "no split": {"path": "someone/sums", "subset": "hard"},
        "another split": {"path": "someone/sums", "subset": "hard", "split": "tset"},
        "another revision": {"path": "someone/lines", "revision": "v9"},
        "another name": {"path": "someone/nothing"},
    }
    found = dict(zip(asked, loaded(list(asked.values()), environment(hub, tmp_path)), strict=True))
    assert found["lines"] == [["1+0=", "1"], 8, "someone/lines[train], row 0"]
    assert found["lines of another revision"] == [["3+0=", "3"], 2, "someone/lines[train], row 0"]
    assert found["subset"] == [["1+0=", "1"], 8, "someone/sums (easy)[train], row 0"]
    assert found["split of a subset"] == [["50+0=", "50"], 2, "someone/sums (hard)[test], row 0"]
    assert found["no subset"].endswith("available configs: ['easy', 'hard']. Choose one with `subset`")
    assert found["another subset"].endswith("'harder' not found. Available: ['easy', 'hard']. Choose one with `subset`")
    assert found["no split"] == "dataset someone/sums (hard) has the splits train, test: choose one with `split`"
    assert "Unknown split" in found["another split"]
    assert "Revision 'v9' doesn't exist" in found["another revision"]
    assert found["another revision"].endswith("Give a branch, a tag or a commit that it has")
    assert "someone/nothing cannot be loaded: Dataset 'someone/nothing' doesn't exist" in found["another name"]
    assert "hf auth login" in found["another name"]
    assert any(request.startswith("GET datasets/someone/sums/resolve/") for request in hub.asked), "nothing was downloaded"


@pytest.mark.slow
def test_without_a_network_only_the_requested_revision_is_read_from_the_cache(hub, tmp_path):
    asked = [{"path": "someone/lines"}, {"path": "someone/lines", "revision": "v1"}, {"path": "someone/sums", "subset": "easy"}]
    empty = loaded(asked, environment(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert all("HF_HUB_OFFLINE is set, and the cache has no copy of it" in found for found in empty)
    assert loaded(asked[:1], environment(hub, tmp_path))[0][1] == 8
    before = len(hub.asked)
    lines_of_main, lines_of_v1, _ = loaded(asked, environment(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert len(hub.asked) == before, "the hub was asked though the process is offline"
    assert lines_of_main == [["1+0=", "1"], 8, "someone/lines[train], row 0"]
    assert "may not be of the revision v1" in lines_of_v1


def trained(folder: Path, env: dict[str, str], **keys) -> subprocess.CompletedProcess:
    config = {
        "sft": {"max_num_steps": 2, "global_batch_size": 4},
        "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
        "data": {"train": {"dataset_name": "huggingface", "response_key": "answer", "output_key": None, **keys}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "rlcore_cli.main", "train", "run.yaml"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.full("the first test here loads every kind of repository, and a run reads the records of any dataset alike")
@pytest.mark.slow
def test_a_config_trains_on_a_hub_dataset(hub, tmp_path):
    env = environment(hub, tmp_path / "home")
    done = trained(tmp_path, env, path="someone/sums", subset="easy")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]


@pytest.mark.full("the first two tests here have the same errors, without a command around them")
@pytest.mark.slow
def test_an_unknown_name_and_a_missing_copy_are_user_errors_of_the_command(hub, tmp_path):
    env = environment(hub, tmp_path / "home")
    for more, keys, says in (
        ({}, {"path": "someone/nothing"}, "Dataset 'someone/nothing' doesn't exist"),
        ({"HF_HUB_OFFLINE": "1"}, {"path": "someone/lines"}, "HF_HUB_OFFLINE is set, and the cache has no copy of it"),
    ):
        done = trained(tmp_path, {**env, **more}, **keys)
        assert done.returncode == UserError.exit_code == 2
        assert says in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr


def test_a_model_of_a_hub_that_does_not_answer_is_one_quick_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))
    with pytest.raises(DataError, match=r"nobody/none-such.*127\.0\.0\.1:9 failed with.*HF_ENDPOINT selects another hub"):
        load_tokenizer("nobody/none-such")


def test_offline_the_error_of_a_missing_model_does_not_advise_another_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set\. Give the path of a model folder or \.gguf file") as caught:
        load_tokenizer("nobody/none-such")
    assert "HF_ENDPOINT" not in str(caught.value)


def test_a_folder_without_tokenizer_files_is_reported_as_such(tmp_path):
    with pytest.raises(DataError, match=r"it has no tokenizer files\. Use a model's name, a folder"):
        load_tokenizer(tmp_path)
