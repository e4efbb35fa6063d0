"""Output of `rlcore train` at startup, after Ctrl-C, and if it cannot start."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from rlcore_cli.main import main

ROOT = Path(__file__).parents[2]
IMPATIENT = """
import os
import signal

from rl_envs import ArithmeticEnvironment


class Impatient(ArithmeticEnvironment):
    steps, presses = 0, int(os.environ["PRESSES"])

    def step(self, *arguments, **named):
        Impatient.steps += 1
        for _ in range(Impatient.presses if Impatient.steps == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return super().step(*arguments, **named)
"""


@pytest.fixture
def rlcore(monkeypatch, capfd, tmp_path):
    """The command in this process: exit code, standard output and standard error."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlcore", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capfd.readouterr()
        return left.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def config(tmp_path):
    values = {
        "defaults": str(ROOT / "examples" / "grpo_addition.yaml"),
        "grpo": {"max_num_steps": 5, "num_prompts_per_step": 2, "val_period": 0, "val_at_start": False, "val_at_end": False},
        "cluster": {"backend": "in_process"},
        "logger": {"run_name": "run"},
    }
    path = tmp_path / "sums.yaml"
    path.write_text(json.dumps(values))
    return path


def test_ctrl_c_is_acknowledged_at_once_and_is_not_an_error(rlcore, config, tmp_path, monkeypatch):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    monkeypatch.setenv("PRESSES", "1")
    code, out, err = rlcore("train", config, "++env.arithmetic.env_cls=impatient.Impatient")
    assert code == 130
    assert out.splitlines()[:2] == ["run folder runs/run", "starting policy hf, generation hf, env arithmetic"]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == ["1/5", "2/5"]
    assert err.splitlines()[-2:] == [
        "warning: Ctrl-C: stopping after this step, with a checkpoint; a second signal stops at once",
        "Stopped after step 2 (Ctrl-C): its checkpoint is saved; run the same command to continue.",
    ]


def test_ctrl_c_twice_ends_the_run_within_its_step(rlcore, config, tmp_path, monkeypatch):
    (tmp_path / "hasty.py").write_text(IMPATIENT)
    monkeypatch.setenv("PRESSES", "2")
    code, out, err = rlcore("train", config, "++env.arithmetic.env_cls=hasty.Impatient")
    assert code == 130
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == ["1/5"]
    first, second, third = err.splitlines()[-3:]
    assert third == "Stopped immediately (Ctrl-C). The same command continues from the last checkpoint, if any."
    assert first.startswith("warning: Ctrl-C: stopping after this step")
    assert second == "warning: Ctrl-C again: stopping at once; progress since the last checkpoint is lost"
    status = json.loads((tmp_path / "runs" / "run" / "status.json").read_text())
    assert (status["state"], status["during"]) == ("interrupted", "rollout")


@pytest.mark.slow
def test_the_folder_of_a_run_that_failed_before_its_first_step_is_reused(rlcore, config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for _ in range(2):
        code, out, err = rlcore("train", config, "policy.model_name=model")
        assert (code, out.splitlines()[0]) == (2, "run folder runs/run"), err
    occupied = ", because runs/run exists (finished); logger.run_name=NAME chooses another name"
    for folder in ("run", f"run-2{occupied}"):
        code, out, err = rlcore("train", config, "--resume", "never", "grpo.max_num_steps=1")
        assert (code, out.splitlines()[0]) == (0, f"run folder runs/{folder}"), err
        assert re.fullmatch(r"1 step done; training took \d+ s", out.splitlines()[-2])
    assert json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["state"] == "finished"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run", "run-2"]


@pytest.mark.slow
def test_a_resume_under_another_config_is_refused_before_any_model_is_loaded(rlcore, config, tmp_path):
    assert rlcore("train", config, "grpo.max_num_steps=1")[0] == 0
    model = tmp_path / "without_weights"
    shutil.copytree(ROOT / "examples" / "addition" / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    code, _, err = rlcore("train", config, "grpo.max_num_steps=2", f"policy.model_name={model}")
    assert code == 2
    assert f"/examples/addition/model' then, '{model}' now" in err


def test_a_run_folder_that_cannot_be_created_is_a_user_error(rlcore, config, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = rlcore("train", config, "logger.log_dir=file")
    assert (code, out) == (2, "")
    assert "\nerror: Cannot create the folder file/run: " in err
    assert err.endswith("Choose another one with logger.log_dir=FOLDER.\n")


def test_ray_is_asked_not_to_color_the_lines_of_workers_in_redirected_output(rlcore, monkeypatch):
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")  # restored after the test
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    rlcore("--version")
    assert os.environ["RAY_COLOR_PREFIX"] == "0"
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    rlcore("--version")
    assert os.environ["RAY_COLOR_PREFIX"] == "1"
