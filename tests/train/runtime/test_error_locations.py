"""Errors that only a worker or the data can find still name the config key and its line."""

import json
import pickle
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.errors import ConfigError, DataError, ResourceInsufficientError, RLCoreError, UserError, WorkerError, with_key
from rl_train.assembly.error_locations import with_location
from rl_train.config.loader import load_config
from rl_train.launch.train import train

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "addition" / "model"
CONFIG = """\
sft: {max_num_steps: 1, global_batch_size: 2}
policy:
  backend: hf
  model_name: MODEL
  max_total_sequence_length: 16
data:
  train: {dataset_name: arithmetic, num_samples: 8, with_response: true}
cluster: {backend: in_process}
logger: {log_dir: RUNS}
"""


@pytest.fixture
def config(tmp_path):
    """Writes `CONFIG` with changes to its text."""

    def write(*changes):
        text = CONFIG.replace("MODEL", str(MODEL)).replace("RUNS", str(tmp_path / "runs"))
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


LATE = {
    "an expression for adapters that matches no layer": (
        ("  max_total", "  hf_cfg: {lora: {target_modules: '.*nothing'}}\n  max_total"),
        (5, "policy.hf_cfg.lora.target_modules", "'.*nothing' as a regular expression for full module names matches no"),
    ),
    "an argument that the scheduler refuses": (
        ("  max_total", "  scheduler: {name: torch.optim.lr_scheduler.OneCycleLR, kwargs: {max_lr: 0.1}}\n  max_total"),
        (5, "policy.scheduler.kwargs", "OneCycleLR rejects"),
    ),
    "a field that the model's config lacks": (
        ("  max_total", "  hf_cfg:\n    config_overrides: {num_layerz: 3}\n  max_total"),
        (6, "policy.hf_cfg.config_overrides.num_layerz", "the LlamaConfig of"),
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_errors_found_by_a_worker_are_reported_with_their_config_line(config, tmp_path, case):
    change, (line, key, says) = LATE[case]
    path = config(change)
    with pytest.raises(RLCoreError) as caught:
        train(path, console=False)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert text.startswith(f"{path}:{line}:"), text
    assert f" {key}: " in text
    assert says in text
    assert "rank 0" not in text
    status = json.loads((tmp_path / "runs" / "run" / "status.json").read_text())
    assert key in status["error"]


def test_data_that_cannot_be_read_is_reported_at_the_dataset_that_names_it(config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1", "expected_answer": "1"}\n{"frage": "2"}\n')
    path = config(("{dataset_name: arithmetic, num_samples: 8, with_response: true}", f"{{dataset_name: jsonl, path: {rows}}}"))
    with pytest.raises(DataError) as caught:
        train(path, console=False)
    assert str(caught.value).startswith(f"{path}:7:3: data.train.input_key: {rows}:2: the field 'question'"), caught.value


def test_a_model_without_a_tokenizer_is_reported_at_the_key_of_the_model(config, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama"}')
    path = config((str(MODEL), str(bare)))
    with pytest.raises(UserError) as caught:
        train(path, console=False)
    assert str(caught.value).startswith(f"{path}:4:15: policy.model_name: "), caught.value


@pytest.mark.parametrize(
    ("group", "message", "of_error", "line", "key"),
    [
        (
            "value",
            "`policy.optimizer.name`: torch.optim has no such class.",
            "policy.optimizer.name",
            11,
            "value.optimizer.name",
        ),
        ("value", "`policy.optimizer.kwargs` is missing lr.", "policy.optimizer.kwargs", 11, "value.optimizer.kwargs"),
        ("value", "A key of the optimizer.", "optimizer.kwargs.momentum", 11, "value.optimizer.kwargs.momentum"),
        ("value", "A key of another section: `policy.optimizer.name`.", "num_workers_of_another", 11, "value"),
        ("env.sums", "`timeout_s` is too short.", "timeout_s", 13, "env.sums.timeout_s"),
        ("env.sums", "No key is given: `timeout_s`.", None, 13, "env.sums"),
    ],
)
def test_a_worker_of_another_section_is_reported_at_that_section(config, group, message, of_error, line, key):
    ppo = (
        "value:\n  {backend: hf, model_name: m, optimizer: {name: torch.optim.SGD, kwargs: {momentum: 0.9}}}\n"
        "env:\n  sums: {name: math, timeout_s: 1.0}\n"
    )
    path = config(("sft: {max_num_steps: 1, global_batch_size: 2}", "ppo: {max_num_steps: 1}"))
    text = path.read_text().replace("  max_total", "  generation: {backend: hf, max_new_tokens: 4}\n  max_total")
    path.write_text(text + ppo)
    config_of_run = load_config(path)
    error = WorkerError(f"rank 1 (data=1) of '{group}' failed in setup(): {message}")
    error.group, error.__cause__ = group, pickle.loads(pickle.dumps(ConfigError(message, key=of_error)))
    with pytest.raises(InvalidConfigError) as caught, with_location(config_of_run):
        raise error
    [problem] = caught.value.problems
    assert (problem.location.line, ".".join(map(str, problem.path))) == (line + 1, key)
    assert "rank 1" not in str(problem)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_errors_that_are_not_user_errors_are_not_changed(config):
    config_of_run = load_config(config())
    error = WorkerError("rank 0 of 'policy' failed in train(): RuntimeError: out of memory")
    error.group, error.__cause__ = "policy", RuntimeError("out of memory")
    with pytest.raises(WorkerError, match="rank 0") as caught, with_location(config_of_run):
        raise error
    assert caught.value is error


def test_the_type_of_an_error_of_the_driver_stays(config):
    path = config()
    expected = pytest.raises(ResourceInsufficientError, match=f"{path}:8:10: cluster: Asked for")
    with expected, with_location(load_config(path)), with_key("cluster"):
        raise ResourceInsufficientError("Asked for 64 CPUs.")
