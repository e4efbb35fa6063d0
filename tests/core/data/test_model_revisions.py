"""Models at a revision, `owner/name@revision`: config, tokenizer and weights from a hub on the loopback device, and errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_hub import Repository, serving
from safetensors.torch import load, save

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
NORM = "model.norm.weight"


def files(*, norm: float, end: int) -> dict[str, bytes]:
    """The files of the model with another final norm, another end token and another chat template."""
    content = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    weights = load(content["model.safetensors"])
    weights[NORM].fill_(norm)
    content["model.safetensors"] = save(weights, {"format": "pt"})
    generation = json.loads(content["generation_config.json"])
    content["generation_config.json"] = json.dumps({**generation, "eos_token_id": end}).encode()
    content["config.json"] = json.dumps({**json.loads(content["config.json"]), "eos_token_id": end}).encode()
    content["chat_template.jinja"] += f"{{# {norm} #}}".encode()
    return content


@pytest.fixture(scope="module")
def hub():
    revisions = {"main": files(norm=2.0, end=2), "v1": files(norm=3.0, end=3)}
    with serving({"someone/adder": Repository(revisions)}) as served:
        yield served


def environment(hub, home: Path, **more: str) -> dict[str, str]:
    """Environment of a process that uses only this hub and cache; the libraries read it at import."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HUB_DISABLE_TELEMETRY": "1", **own, **more}


LOAD = """
import json, sys, tempfile
from pathlib import Path
import torch
from safetensors.torch import load_file
from rl_backends_hf.model import load_model
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_megatron.hf_folder import find_folder
from rl_backends_vllm.model_folder import model_files
from rl_core.data.tokenizer import load_tokenizer
from rl_train.diagnostics.model_files import read_model_config
found = {}
for name in sys.argv[1:]:
    folder = find_folder(name)
    model = load_model(name, options=HFModelConfig(), dtype=torch.float32)
    with model_files(name, tokenizer_name=None, trust_remote_code=False, temp_dir=Path(tempfile.gettempdir())) as files:
        found[name] = {
            "HF": [model.model.norm.weight[0].item(), model.config.eos_token_id],
            "Megatron": [load_file(folder / "model.safetensors")["model.norm.weight"][0].item()],
            "vLLM": [files.path, files.revision, files.tokenizer_path, files.generation_config.eos_token_id],
            "tokenizer": load_tokenizer(name).chat_template.rpartition("{#")[2],
            "config": read_model_config(name).eos_token_id,
        }
print(json.dumps(found))
"""


def loaded(env: dict[str, str], *names: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names], env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_backend_reads_config_tokenizer_and_weights_of_one_revision(hub, tmp_path):
    names = ["someone/adder@v1", "someone/adder"]
    found = loaded(environment(hub, tmp_path), *names)
    for name, revision, norm, end in (*zip(names, ("v1", None), (3.0, 2.0), (3, 2), strict=True),):
        assert found[name] == {
            "HF": [norm, end],
            "Megatron": [norm],
            "vLLM": ["someone/adder", revision, "someone/adder", end],
            "tokenizer": f" {norm} #}}",
            "config": end,
        }
    before = len(hub.asked)
    assert loaded(environment(hub, tmp_path, HF_HUB_OFFLINE="1"), *names) == found
    assert len(hub.asked) == before, "the hub was asked though the process is offline"


COMMANDS = """
import contextlib, io, json, sys
from rlcore_cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["rlcore", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    sys.stdout.write(json.dumps([code, " ".join((output.getvalue() + errors.getvalue()).split())]) + "\\n")
"""


def commands(folder: Path, env: dict[str, str], *lines: list[str]) -> list[tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(lines)], cwd=folder, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_run_trains_a_revision_records_it_and_refuses_unknown_ones_with_the_key(hub, tmp_path):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "sft": {"max_num_steps": 1, "global_batch_size": 4},
        "policy": {"backend": "hf", "model_name": "someone/adder@v1", "max_total_sequence_length": 16},
        "data": {"train": {"dataset_name": "jsonl", "path": "rows.jsonl", "input_key": "prompt", "response_key": "response"}},
        "cluster": {"backend": "in_process"},
    }
    config["data"]["train"]["output_key"] = None
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    shutil.copytree(MODEL, tmp_path / "folder")
    trained, pushed, unknown, of_a_folder, unnamed = commands(
        tmp_path,
        environment(hub, tmp_path / "home"),
        ["train", "run.yaml"],
        ["convert", "runs/run", "out"],
        ["train", "run.yaml", "policy.model_name=someone/adder@v9", "logger.log_dir=other"],
        ["train", "run.yaml", "policy.model_name=folder@v1", "logger.log_dir=other"],
        ["train", "run.yaml", "policy.model_name=someone/adder@", "logger.log_dir=other"],
    )
    assert trained[0] == 0, trained[1]
    assert pushed[0] == 0, pushed[1]
    [weights] = (tmp_path / "out").glob("*.safetensors")
    assert load(weights.read_bytes())[NORM][0].item() == pytest.approx(3.0, abs=1e-3), "not the weights of the revision"
    assert "someone/adder@v1" in (tmp_path / "runs" / "run" / "config.yaml").read_text()
    for (code, says), reason in (
        (unknown, f"someone/adder on {hub.url} has no branch, tag or commit 'v9'"),
        (of_a_folder, "folder is a local path and has no revisions: remove `@v1`"),
        (unnamed, "'someone/adder@' is not an existing path, and not a valid name of a model on the hub"),
    ):
        assert code == 2, says
        assert reason in says
        assert "policy.model_name" in says
        assert "Traceback" not in says
