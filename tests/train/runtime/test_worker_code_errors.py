"""A custom loss or environment class that raises in a worker is reported with its file and line."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from later_rules import report_of

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.errors import ConfigError
from rl_train.config.loader import load_config
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
CODE = """
    from rl_core.interfaces import EnvironmentInterface
    from rl_core.interfaces.policy import LossFunction

    class Failing(LossFunction):
        def __init__(self, config):
            self.config = config

        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            return data["no_such_key"], {}

    class InTorch(LossFunction):
        def __init__(self, config):
            self.config = config

        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            return next_token_logprobs.view(-5), {}

    class Raising(EnvironmentInterface):
        def __init__(self, config):
            raise OSError("no licence")

        def step(self, message_log_batch, metadata):
            return None

    class LicenceError(Exception):
        def __init__(self, text, *, code):
            super().__init__(text)

    class RaisingUnpicklable(Raising):
        def __init__(self, config):
            raise LicenceError("expired", code=3)

    class WithoutStep(EnvironmentInterface):
        def __init__(self, config):
            pass
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(textwrap.dedent(CODE).splitlines(), 1) if text in line)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write the config of a run with these sections; the classes are in the module `their_code`."""
    (tmp_path / "their_code.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_code", raising=False)

    def write(cluster="in_process", **sections):
        values = {
            "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8, "with_response": True}},
            "cluster": {"backend": cluster},
            "checkpointing": {"enabled": False},
            **sections,
        }
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(values, indent=1))
        return path

    yield write
    sys.modules.pop("their_code", None)


def grpo(env_cls: str) -> dict:
    return {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8}},
        "env": {"arithmetic": {"env_cls": f"their_code.{env_cls}"}},
    }


@pytest.mark.parametrize(
    ("name", "error", "text"), [("Failing", "KeyError", "no_such_key"), ("InTorch", "RuntimeError", "view(-5)")]
)
def test_a_loss_that_raises_in_a_step_is_reported_with_its_line(config, name, error, text):
    path = config(sft={"global_batch_size": 2, "max_num_steps": 1}, loss_fn={"name": f"their_code.{name}"})
    with pytest.raises(
        InvalidConfigError,
        match=rf"run.yaml:\d+:\d+: loss_fn.name: their_code.{name} raised {error} at .*their_code.py:{line_of(text)}: ",
    ):
        train(path, console=False)


@pytest.mark.full("starts a Ray for each command; the tests in this process cover the messages")
@pytest.mark.ray
@pytest.mark.parametrize(
    ("sections", "message", "text"),
    [
        (
            {"sft": {"global_batch_size": 2, "max_num_steps": 1}, "loss_fn": {"name": "their_code.Failing"}},
            "loss_fn.name: their_code.Failing raised KeyError at ",
            "no_such_key",
        ),
        (grpo("Raising"), "env.arithmetic.env_cls: their_code.Raising raised OSError at ", "no licence"),
        (
            grpo("RaisingUnpicklable"),
            "env.arithmetic.env_cls: their_code.RaisingUnpicklable raised their_code.LicenceError at ",
            "expired",
        ),
    ],
)
def test_code_that_raises_in_another_process_is_reported_with_its_line(config, sections, message, text):
    path = config("ray", **sections)
    command = [Path(sys.executable).with_name("rlcore"), "train", str(path)]  # its own Ray, which finds modules in its folder
    finished = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert f"their_code.py:{line_of(text)}: " in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_environment_whose_constructor_raises_is_reported_with_its_line(config):
    path = config(**grpo("Raising"))
    with pytest.raises(
        InvalidConfigError,
        match=rf"env.arithmetic.env_cls: their_code.Raising raised OSError at .*:{line_of('no licence')}: no licence",
    ):
        train(path, console=False)


def test_an_environment_without_step_is_refused_by_validate_and_at_the_start(config):
    name = "WithoutStep"
    path = config(**grpo(name))
    message = rf"The environment their_code.{name} \(.*their_code.py:{line_of(f'class {name}')}\) has no method step"
    with pytest.raises(ConfigError, match=rf"run.yaml:\d+:\d+: env.arithmetic.env_cls: {message}"):
        train(path, console=False)
    loaded = load_config(path)
    found = {problem.path: problem.message for problem in report_of(loaded).problems}
    assert "has no method step" in found["env", "arithmetic", "env_cls"]
