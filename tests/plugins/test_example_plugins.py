"""The recurrent model of examples/plugins, which is not in Transformers: its conformance tests, training, and a resumed run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_scaffold import install

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
RECURRENT = PLUGINS / "recurrent"
pytestmark = pytest.mark.slow


@pytest.fixture
def python(site, tmp_path):
    """Run Python with the plugin installed, in an empty folder."""
    install(site, RECURRENT)

    def run(*arguments):
        path = os.pathsep.join([str(site.folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "RLCORE_STRICT_PLUGINS": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_keeps_its_promises(python):
    output = python("-m", "pytest", "-p", "no:cacheprovider", RECURRENT / "tests", "-k", "not Package")
    for kind in ("policy", "generation"):
        [(kept, promises, others)] = re.findall(rf"{kind} backend 'recurrent': (\d+) of (\d+) promises kept(.*)", output)
        assert int(kept) + sum(map(int, re.findall(r"(\d+) not declared", others))) == int(promises)


def test_a_resumed_run_equals_an_uninterrupted_one(python, tmp_path):
    python(RECURRENT / "make_model.py", tmp_path / "model")
    whole, stopped = tmp_path / "runs" / "whole", tmp_path / "runs" / "stopped"
    fixed = ["sft.max_num_steps=4", "sft.val_period=0", "checkpointing.save_period=2", "checkpointing.keep_latest_k=2"]
    command = ["-m", "rlcore_cli.main", "train", RECURRENT / "sft.yaml", f"policy.model_name={tmp_path / 'model'}", *fixed]
    python(*command, "logger.run_name=whole")
    # The state after a kill: the checkpoint in the middle, and metrics of steps that will be repeated.
    middle = Path("checkpoints") / "step_000002"
    shutil.copytree(whole / middle, stopped / middle)
    shutil.copy(whole / "metrics.jsonl", stopped)
    python(*command, "--resume", stopped)
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4]
    assert rows(stopped) == rows(whole)
    weights = [load_file(run / "checkpoints/step_000004/policy/weights/model.safetensors") for run in (whole, stopped)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def rows(run):
    """The metrics of a run's steps that do not depend on the machine."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in found if "loss" in row]
