"""Commands that read a checkpoint run no code from it: resume, eval, convert, report."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rl_core.errors import CheckpointError, RLCoreError, UserError
from rl_train.checkpoints.manifest import write_manifest
from rlcore_cli.main import app

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
CONFIG = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "seed": 3, "max_val_samples": 8},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {
        "train": {"dataset_name": "arithmetic", "num_samples": 40},
        "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
    },
    "env": {"arithmetic": {"num_workers": 1}},
    "checkpointing": {"save_period": 1},
    "cluster": {"backend": "in_process"},
}


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a config and a finished two-step run."""
    from rl_train.launch.train import train

    folder = tmp_path_factory.mktemp("run")
    (folder / "run.yaml").write_text(json.dumps(CONFIG))
    train(folder / "run.yaml", [f"logger.log_dir={folder / 'runs'}"], console=False)
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A copy of it as working directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def newest(folder):
    return folder / "runs" / "run" / "checkpoints" / "step_000002"


def sign(checkpoint):
    """Update the digests to the changed files, as an attacker would."""
    write_manifest(checkpoint, step=2, metrics={})


def rlcore(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.slow
def test_every_command_refuses_or_ignores_pickles_in_a_checkpoint(folder):
    planted, step = Planted(folder / "code-ran"), newest(folder)
    for name in (".metadata", "trainer.pt", "rng-00000.pt", "common.pt"):
        (step / "policy" / "optimizer" / name).write_bytes(pickle.dumps(planted))
    torch.save(planted, step / "policy" / "weights" / "pytorch_model.bin")
    sign(step)
    resumed = rlcore("train", "run.yaml", "grpo.max_num_steps=3", "--resume", step, "--allow-config-change")
    assert isinstance(resumed.exception, CheckpointError)
    for arguments in (
        ("eval", "run.yaml", "--checkpoint", step),
        ("convert", step, folder / "converted"),
        ("convert", step, folder / "merged", "--merge"),
        ("report", folder / "runs" / "run"),
    ):
        result = rlcore(*arguments)
        assert result.exit_code == 0, (arguments, result.output, result.exception)
    # Without tensors, Transformers would take the pickle.
    (step / "policy" / "weights" / "model.safetensors").unlink()
    sign(step)
    for arguments in (
        ("train", "run.yaml", "grpo.max_num_steps=3", "--resume", step, "--allow-config-change"),
        ("eval", "run.yaml", "--checkpoint", step),
    ):
        assert isinstance(rlcore(*arguments).exception, RLCoreError), arguments
    assert not planted.marker.exists()


def test_a_conversion_runs_code_that_the_checkpoint_names_only_if_it_is_trusted(folder):
    step, marker = newest(folder), folder / "code-ran"
    (folder / "planted_backend.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\nclass Backend:\n    checkpoint_conversions = {{}}\n"
    )
    state = json.loads((step / "state.json").read_text())
    ours = state["config"]["policy"]
    sys.path.insert(0, str(folder))
    for policy, merge in (
        ({**ours, "backend": "planted_backend.Backend"}, False),
        ({**ours, "backend": "planted_backend:Backend"}, True),
        ({**ours, "hf_cfg": {**ours["hf_cfg"], "trust_remote_code": True}}, True),
    ):
        (step / "state.json").write_text(json.dumps({**state, "config": {**state["config"], "policy": policy}}))
        sign(step)
        result = rlcore("convert", step, folder / "out", *(["--merge"] if merge else []))
        assert isinstance(result.exception, UserError)
        assert "--trust-checkpoint" in str(result.exception)
        assert not marker.exists()
    assert rlcore("convert", step, folder / "out", "--merge", "--trust-checkpoint").exit_code == 0


def test_eval_convert_and_resume_name_a_damaged_file_and_the_older_checkpoint(folder):
    step = newest(folder)
    weights = step / "policy" / "weights" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    for arguments in (
        ("eval", "run.yaml", "--checkpoint", folder / "runs" / "run"),
        ("convert", step, folder / "converted"),
        ("train", "run.yaml", "grpo.max_num_steps=3", "--resume", step, "--allow-config-change"),
    ):
        result = rlcore(*arguments)
        assert isinstance(result.exception, CheckpointError), arguments
        assert "policy/weights/model.safetensors: its content changed after it was written" in str(result.exception)
        assert f"--resume {step.with_name('step_000001')}" in str(result.exception)
    assert rlcore("report", folder / "runs" / "run").exit_code == 0
