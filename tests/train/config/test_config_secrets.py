"""Secrets from the environment reach the run, but are never written, printed or sent to a logger."""

import json

import pytest
import yaml

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.loader import load_config
from rl_train.config.secrets import Secrets
from rl_train.launch.train import train

TOKEN = "tk-5f0c2b7e91d84d0fa3"
CREDENTIALS = {"SERVICE_TOKEN": TOKEN, "RUN_NAME": "nightly", "TRACKER": "https://ann:pw-77aa@host/x", "HUB": "hf_abcdefgh1234"}
RECORDING_LOGGER = """
import os

from rl_train.metrics.logger import Logger


class Recording(Logger):
    seen = []

    def __init__(self, config, folder):
        Recording.seen.append(("config", dict(config)))

    def log_metrics(self, metrics, step):
        if "REFUSE" in os.environ:
            raise RuntimeError("the service refused " + Recording.seen[-2][1]["token"])

    def log_hyperparams(self, params):
        Recording.seen.append(("params", params))
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config file of a run in this process whose logger needs secrets; its folder is on the import path."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    model = __file__.split("/tests/")[0] + "/examples/addition/model"
    path = tmp_path / "run.yaml"
    values = {
        "sft": {"max_num_steps": 2, "global_batch_size": 2},
        "policy": {"backend": "hf", "model_name": model, "max_total_sequence_length": 16},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8, "with_response": True}},
        "cluster": {"backend": "in_process"},
        "logger": {
            "log_dir": str(tmp_path / "runs"),
            "run_name": "${oc.env:RUN_NAME}",
            "loggers": {
                f"recording_{tmp_path.name}.Recording": {
                    "token": "${oc.env:SERVICE_TOKEN}",
                    "header": "Bearer ${oc.env:SERVICE_TOKEN} ${oc.env:RUN_NAME} \\${literal}",
                    "same": "${.token}",
                    "url": "${oc.env:TRACKER}",
                    "hub": "${oc.env:HUB}",
                    "decoded": "${oc.decode:'[\"${oc.env:SERVICE_TOKEN}\"]'}",
                }
            },
        },
    }
    path.write_text(json.dumps(values))
    (tmp_path / f"recording_{tmp_path.name}.py").write_text(RECORDING_LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def logger_section(values):
    [section] = values["logger"]["loggers"].values()
    return section


def test_secrets_are_redacted_and_other_environment_values_are_not(config):
    loaded = load_config(config)
    real, shown = logger_section(loaded.resolved), logger_section(loaded.redacted)
    assert (real["token"], real["same"], real["decoded"]) == (TOKEN, TOKEN, [TOKEN])
    assert shown["token"] == "${oc.env:SERVICE_TOKEN}"
    assert shown["same"] == "${.token}"
    assert shown["header"] == "Bearer ${oc.env:SERVICE_TOKEN} ${oc.env:RUN_NAME} \\${literal}"
    assert shown["url"] == "${oc.env:TRACKER}"
    assert shown["hub"] == "${oc.env:HUB}"
    assert shown["decoded"] == ["${oc.env:SERVICE_TOKEN}"]
    assert loaded.redacted["logger"]["run_name"] == "nightly"


def test_written_config_has_no_secret_and_loads_as_the_same_run(config, tmp_path):
    loaded = load_config(config)
    again = tmp_path / "again.yaml"
    again.write_text(loaded.to_yaml())
    assert TOKEN not in again.read_text()
    assert load_config(again).resolved == loaded.resolved


def test_validate_and_explain_print_no_secret(config, capsys):
    from rlcore_cli.explain import explain_in
    from rlcore_cli.validate import validate

    validate(config, resolved=True)
    validate(config, as_json=True)
    explain_in(load_config(config), "logger")
    printed = capsys.readouterr().out
    assert TOKEN not in printed
    assert "pw-77aa" not in printed
    assert printed.count("${oc.env:SERVICE_TOKEN}") >= 3


def test_error_about_a_secret_value_does_not_show_it(config, tmp_path):
    values = json.loads(config.read_text())
    values["sft"]["max_num_steps"] = "${oc.env:SERVICE_TOKEN}"
    config.write_text(json.dumps(values))
    with pytest.raises(InvalidConfigError) as caught:
        load_config(config)
    assert "sft.max_num_steps: must be a whole number" in str(caught.value)
    assert "${oc.env:SERVICE_TOKEN}" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_run_writes_no_secret_and_resumes_after_the_token_changed(config, tmp_path, monkeypatch):
    train(config, console=False)
    folder = tmp_path / "runs" / "nightly"
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert TOKEN.encode() not in content, file
            assert b"pw-77aa" not in content, file
    module = __import__(f"recording_{tmp_path.name}")
    sent = dict(module.Recording.seen)
    assert sent["config"]["token"] == TOKEN
    assert TOKEN not in json.dumps(sent["params"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["logger"]["run_name"] == "nightly"
    monkeypatch.setenv("SERVICE_TOKEN", "tk-another-one-0123")
    assert train(config, ["sft.max_num_steps=3"], console=False).resumed_from == 2
    assert module.Recording.seen[-2][1]["token"] == "tk-another-one-0123"


def test_status_and_log_of_a_failed_run_do_not_show_a_secret_of_its_error(config, tmp_path, monkeypatch):
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(RuntimeError, match=TOKEN):
        train(config, console=False)
    status = json.loads((tmp_path / "runs" / "nightly" / "status.json").read_text())
    assert status["error"] == "RuntimeError: the service refused ${oc.env:SERVICE_TOKEN}"


@pytest.mark.parametrize(
    ("variable", "key", "value", "secret"),
    [
        ("WANDB_API_KEY", "x", "abc", True),
        ("X", "apiKey", "abc", True),
        ("DB_PASSWORD", "x", "a", True),
        ("MAX_TOKENS", "max_tokens", "512", False),
        ("API_TOKENS", "x", "abc,def", True),
        ("DATA", "path", "/data/tokenized/keyboard", False),
        ("HOME", "tokenizer", "/home/ann", False),
        ("PROXY", "x", "http://ann:pw@host:80", True),
        ("PROXY", "x", "http://host:80/a:b@c", False),
        ("X", "x", "ghp_0123456789abcdef", True),
    ],
)
def test_secrets_are_known_by_name_or_form(monkeypatch, variable, key, value, secret):
    from omegaconf import OmegaConf

    monkeypatch.setenv(variable, value)
    secrets = Secrets()
    config = OmegaConf.create({key: f"${{oc.env:{variable}}}"})
    with secrets.recording((key,)):
        assert config[key] == value
    assert bool(secrets.values) is secret


def test_truncated_secrets_are_redacted_too(monkeypatch):
    secrets = Secrets(values={"s" * 80: "${oc.env:LONG}", "abc": "${oc.env:SHORT}"})
    assert secrets.redact(f"found '{'s' * 56}...") == f"found '${{oc.env:LONG}}{'s' * 16}..."
    assert secrets.redact("abc") == "abc"
