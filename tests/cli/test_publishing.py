"""`rlcore convert --push`: a model card without private values, and an upload to a server with the Hub's protocol."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from command_line import rlcore
from huggingface_hub import constants

from rl_train.launch.train import train
from rlcore_cli.publishing import model_card
from rlcore_cli.report.run_folder import read_run_folder

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "addition" / "model"
ROW = "What is 2+2 in the warehouse?"


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload: create, preupload, large files, commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        here = f"http://127.0.0.1:{self.server.server_port}"
        if self.headers["Authorization"] != "Bearer hf_right":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{here}/acme/sums"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            self.answer({"files": [self.mode(file["path"]) for file in json.loads(body)["files"]]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self.answer({"transfer": "basic", "objects": [self.upload(wanted, here) for wanted in json.loads(body)["objects"]]})
        else:
            self.server.commits.extend(json.loads(line) for line in body.splitlines())
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{here}/acme/sums/commit/{'0' * 40}"})

    def do_GET(self):
        """Whether the repository exists: asked after a refused creation."""
        self.answer({"error": "Repository not found"}, 401)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    @staticmethod
    def mode(path):
        return {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}

    @staticmethod
    def upload(wanted, here):
        return {**wanted, "actions": {"upload": {"href": f"{here}/objects/{wanted['oid']}"}}}

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Requests are not printed."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.tokens, server.created, server.commits, server.objects = set(), [], [], {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose config has local paths and a row of data."""
    folder = tmp_path_factory.mktemp("run")
    rows = folder / "warehouse.jsonl"
    rows.write_text((json.dumps({"prompt": ROW, "response": "4"}) + "\n") * 4)
    config = {
        "sft": {"max_num_steps": 2, "global_batch_size": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 128,
            "optimizer": {"kwargs": {"lr": 0.00125}},
        },
        "data": {
            "train": {
                "dataset_name": "jsonl",
                "path": str(rows),
                "input_key": "prompt",
                "output_key": None,
                "response_key": "response",
                "system_prompt": ROW,
            }
        },
        "cluster": {"backend": "in_process"},
        "logger": {"log_dir": str(folder / "runs")},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return train(folder / "run.yaml", console=False).folder


def pushed(run, output, hub, *options, token="hf_right"):
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [Path(sys.executable).with_name("rlcore"), "convert", run, output, "--push", "acme/sums", *options]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)


@pytest.mark.slow
def test_the_upload_has_the_weights_and_a_card_without_private_values(run, tmp_path, hub):
    output = tmp_path / "model"
    result = pushed(run, output, hub)
    assert result.returncode == 0, result.stderr
    assert "/acme/sums/commit/" in result.stdout
    assert [(request["organization"], request["name"]) for request in hub.created] == [("acme", "sums")]
    # The key of a private repository differs between versions of huggingface_hub.
    assert hub.created[0].get("visibility") == "private" or hub.created[0]["private"] is True
    assert hub.tokens == {"Bearer hf_right"}
    weights = (output / "model.safetensors").read_bytes()
    assert hub.objects[hashlib.sha256(weights).hexdigest()] == weights
    files = {line["value"]["path"]: line["value"] for line in hub.commits if line["key"] == "file"}
    card = base64.b64decode(files["README.md"]["content"]).decode()
    assert card == (output / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["rlcore", "sft"]
    assert "| `policy.optimizer.kwargs.lr` | `0.00125` |" in text
    assert "| metric | step 1 | step 2 |" in text
    assert '| `data.train.dataset_name` | `"jsonl"` |' in text
    assert "`data.train.system_prompt`" in text
    for private in ("/tmp", str(run.parent), "warehouse", str(MODEL), "hf_right"):
        assert private not in card


HOSTILE = {
    "grpo": {"max_num_steps": 3, "api_key": "Zq81xk", "pin_password": 90210},
    "policy": {
        "backend": "/home/carol/backend",
        "model_name": "projects/carol",
        "optimizer": {"name": "a|b`<script>", "kwargs": {"lr": 0.5, "note": "carol"}},
        "generation": {"backend": "hf", "stop_strings": ["carol"]},
    },
    "data": {
        "train": {"dataset_name": "jsonl", "path": "acme/sums", "system_prompt": "carol", "rows": [{"prompt": 4711}]},
        "validation": {"dataset_name": "x", "path": "carol/rows"},
    },
    "env": {"/home/carol/env": {"limit": 4712}, "math": {"webhook": "https://carol:4713@example.org", "limit": 5}},
    "logger": {"log_dir": "carol", "loggers": {"wandb": {"entity": "carol"}}, "period": 4714},
}


def keys_of(section, prefix=""):
    for name, value in section.items():
        yield from keys_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]


def test_a_card_of_a_hostile_config_has_no_secret_no_local_path_and_no_row(write_run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "datasets--acme--sums").mkdir(parents=True)
    values = {key: {"kind": "file", "source": "/home/carol/run.yaml:1:1"} for key in keys_of(HOSTILE)}
    provenance = {
        "file": "/home/carol/run.yaml",
        "folders": ["/home/carol"],
        "overrides": ["grpo.api_key=Zq81xk"],
        "values": values,
    }
    status = {"state": "failed", "error": "carol"}
    folder = write_run(tmp_path / "carol", steps=3, config=HOSTILE, provenance=provenance, status=status)
    card = model_card(read_run_folder(folder), 2, "acme/model")
    for private in ("carol", "/home", "Zq81xk", "90210", "4711", "4712", "4713", "4714", "script", str(tmp_path)):
        assert private not in card
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["acme/sums"],
        "tags": ["rlcore", "grpo"],
    }
    shown = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert shown == {
        "grpo.max_num_steps",
        "policy.optimizer.kwargs.lr",
        "policy.generation.backend",
        "data.train.dataset_name",
        "data.train.path",
        "data.validation.dataset_name",
        "env.math.limit",
    }
    assert "step 2 |" in text
    assert "step 3 |" not in text


def test_a_card_has_the_results_of_validation_and_of_the_last_step(write_run, tmp_path):
    def metrics(step):
        return {"validation/accuracy": step / 1000} if step % 17 == 0 else {}

    card = model_card(read_run_folder(write_run(tmp_path / "run", steps=100, metrics=metrics)), 100, "acme/sums")
    [row] = [line for line in card.splitlines() if line.startswith("| validation/accuracy")]
    assert "0.017" in row
    assert "0.085" in row
    assert "| step 85 | step 100 |" in card


def test_a_card_names_the_base_model_and_its_revision(write_run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--acme--base").mkdir(parents=True)
    config = {"sft": {"max_num_steps": 1}, "policy": {"backend": "hf", "model_name": "acme/base@refs/pr/1"}}
    values = {key: {"kind": "file", "source": "run.yaml:1:1"} for key in keys_of(config)}
    card = model_card(
        read_run_folder(write_run(tmp_path / "run", steps=1, config=config, provenance={"values": values})), 1, "a/b"
    )
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "acme/base"
    assert '| `policy.model_name` | `"acme/base@refs/pr/1"` |' in text


@pytest.mark.slow
def test_a_refused_upload_keeps_the_model_and_says_how_to_upload_it(run, tmp_path, hub):
    result = pushed(run, tmp_path / "model", hub, token="hf_wrong")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"hf upload acme/sums {tmp_path / 'model'}" in result.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--push", "sums"], "has no owner"),
        (["--push", "acme/su ms"], "Give OWNER/NAME"),
        (["--public"], "Add --push"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_written(run, tmp_path, options, error):
    result = rlcore("convert", run, tmp_path / "model", *options)
    assert result.returncode == 2
    assert error in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_not_part_of_a_run_has_no_card(tmp_path):
    result = rlcore("convert", MODEL, tmp_path / "model", "--push", "acme/sums")
    assert result.returncode == 2
    assert "is not a checkpoint in a run folder" in result.stderr
