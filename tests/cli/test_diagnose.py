"""`rlcore diagnose`: the status of every diagnosis, and exit code 1 if one failed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rl_core.errors import UserError
from rlcore_cli.main import app

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
NAMES = [
    "chat_template_renders",
    "generation_prompt_is_prefix",
    "turns_join",
    "end_of_turn_stops",
    "token_rows",
    "untrained_embeddings",
    "tied_embeddings",
    "length_limit",
    "decode_against_prefill",
    "engine_against_policy",
]
PLUS = 13


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """Diagnose the quickstart's model, or another, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, model=MODEL, as_json=True):
        config = {
            "grpo": {},
            "policy": {
                "backend": "hf",
                "model_name": str(model),
                "max_total_sequence_length": 24,
                "generation": {"backend": "hf", "max_new_tokens": 12},
            },
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40}},
            "env": {"arithmetic": {}},
            "cluster": {"backend": "in_process"},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        result = CliRunner().invoke(app, ["diagnose", "config.yaml", *(["--json"] if as_json else []), *arguments])
        return result, {row["name"]: row for row in json.loads(result.stdout)} if as_json and result.stdout else {}

    return run


def changed_model(folder, change):
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_quickstarts_model_is_sound(diagnose):
    result, found = diagnose()
    assert result.exit_code == 0, result.output
    assert list(found) == NAMES
    assert {row["status"] for row in found.values()} == {"ok"}
    # Both sides are float32, which is found out and not assumed.
    assert found["engine_against_policy"]["details"]["threshold"] == 1.001


def test_the_output_shows_what_was_found_why_it_matters_and_what_to_do(diagnose, tmp_path):
    def zero(tensors):
        tensors["model.embed_tokens.weight"][PLUS] = 0.0

    result, _ = diagnose(model=changed_model(tmp_path / "zeroed", zero), as_json=False)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    at = lines.index("failed  untrained_embeddings")
    assert lines[at + 1].startswith("        this run uses 1 token (13 '+'). all zero: 1 token (13 '+')")
    assert lines[at + 2].startswith("        The model was probably never trained on these tokens")
    assert lines[-1].endswith("1 failed")


def test_a_broken_template_fails_and_the_other_checks_still_run(diagnose):
    template = "{% for m in messages %}{{ m.content }}{{ m.absent.name }}{% endfor %}"
    result, found = diagnose(f"policy.tokenizer.chat_template={json.dumps(template)}")
    # The prompts themselves cannot be rendered, which is known before anything starts.
    assert isinstance(result.exception, UserError)
    assert "absent" in str(result.exception)
    assert found == {}


def test_a_template_whose_end_does_not_stop_the_engine_fails(diagnose):
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} *{% endif %}{% endfor %}"
    result, found = diagnose(f"policy.tokenizer.chat_template={json.dumps(template)}")
    assert result.exit_code == 1, result.output
    assert [name for name, row in found.items() if row["status"] == "failed"] == ["end_of_turn_stops"]
    assert found["end_of_turn_stops"]["remedy"].startswith("Set policy.generation.stop_token_ids: [17]")


def test_an_engine_that_computes_another_distribution_than_the_policy_fails(diagnose):
    result, found = diagnose("++policy.generation.hf_cfg.config_overrides.rms_norm_eps=1.0")
    assert result.exit_code == 1, result.output
    assert found["engine_against_policy"]["status"] == "failed"
    assert found["length_limit"]["status"] == "ok"


def test_an_error_in_the_config_is_a_user_error(diagnose):
    result, _ = diagnose("policy.generation.bakend=hf")
    assert isinstance(result.exception, UserError)
    assert "Did you mean 'backend'?" in str(result.exception)
