"""`rlcore eval --engine openai`: a remote model is evaluated without a policy."""

import json

import pytest
from openai_servers import KEY, MODEL
from typer.testing import CliRunner

from rlcore_cli.main import app

CONFIG = {
    "grpo": {"val_batch_size": 16, "max_val_samples": 16},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {
        "train": {"dataset_name": "arithmetic", "num_samples": 40},
        "validation": {"dataset_name": "arithmetic", "num_samples": 16, "split": "validation", "min_digits": 2},
    },
    "env": {"arithmetic": {"num_workers": 1}},
    "cluster": {"backend": "in_process", "workers_per_node": 1},
}


def evaluate(config, *arguments):
    return CliRunner().invoke(app, ["eval", str(config), "--json", str(config.with_name("found.json")), *arguments])


def server(url, api):
    key = "${oc.env:A_KEY}"
    return f"++policy.generation.openai_cfg={{base_url: '{url}/v1', api_key: '{key}', model: addition, api: {api}}}"


def test_a_config_that_could_not_train_is_evaluated(served, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    filtered = ("--engine", "openai", server(served[0], "completions"), "policy.generation.top_p=0.95")
    found = evaluate(config, *filtered)
    assert found.exit_code == 0, found.output + repr(found.exception)
    trained = CliRunner().invoke(app, ["validate", str(config), "policy.generation.top_p=0.95", "policy.backend=megatron"])
    assert trained.exit_code == 2
    assert "cannot train on filtered samples" in trained.output


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_remote_model_has_the_scores_of_the_same_model_here(served, tmp_path, monkeypatch, api):
    monkeypatch.setenv("A_KEY", KEY)
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    local = evaluate(config)
    assert local.exit_code == 0, local.output + repr(local.exception)
    expected = json.loads((tmp_path / "found.json").read_text())
    found = evaluate(config, "--engine", "openai", server(served[0], api))
    assert found.exit_code == 0, found.output + repr(found.exception)
    scores = json.loads((tmp_path / "found.json").read_text())
    assert scores["modes"][0]["all"]["metrics"]["mean@1"] == expected["modes"][0]["all"]["metrics"]["mean@1"]
    assert scores["weights"]["source"] == "engine"
    assert "engine openai with its own weights" in found.output
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in written + found.output
