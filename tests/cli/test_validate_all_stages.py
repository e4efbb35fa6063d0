"""`rlcore validate --deep` reports the mistakes of all stages together, and each rule that could not be checked."""

import json
import sys
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.loader import load_config
from rlcore_cli.main import main

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
CODE = """
from rl_core.interfaces import EnvironmentInterface

class Game(EnvironmentInterface):
    min_turns = 3

    def step(self, message_log_batch, metadata): ...

    def global_post_process_and_metrics(self, batch): ...

class LongerGame(Game):
    \"\"\"Inherits the number, which is known when the class is imported.\"\"\"

def by_answer(completions, answer, **_):
    return [float(completion == answer) for completion in completions]
"""
CONFIG = f"""\
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: 5
  val_period: 5
policy:
  backend: hf
  model_name: {MODEL}
  precision: bf16
  max_total_sequence_length: 16
  scheduler: {{name: linear, kwargs: {{num_training_steps: 3}}}}
  generation:
    backend: hf
    max_new_tokens: 16
loss_fn: {{name: gspo}}
rollout: {{history: template, min_scored: 9}}
data:
  train: {{dataset_name: jsonl, path: rows.jsonl, output_key: null, task_name: sums}}
env:
  sums: {{reward_fn: code_of_all_stages.by_answer}}
  game: {{env_cls: code_of_all_stages.LongerGame, max_rollout_turns: 2}}
cluster: {{flavor: large}}
checkpointing: {{keep_top_k: 2}}
profiling: {{steps: [9]}}
logger: {{num_rollouts_logged: -1}}
"""
STATIC = {
    (5, "grpo.val_period"): "enables validation, but there is no validation data",
    (9, "policy.precision"): "must be 'float32' or 'bfloat16' or null; found 'bf16'",
    (11, "policy.scheduler.kwargs.num_training_steps"): "the schedule ends after 3 optimizer steps, but the run makes 5",
    (14, "policy.generation.max_new_tokens"): "16 leaves no tokens for a prompt",
    (15, "loss_fn.token_level_loss"): "rollout.history: template can divide a rollout into several segments",
    (16, "rollout.min_scored"): "9 scored rows are more than the 2 samples of a group",
    (22, "cluster.flavor"): "cluster has no key 'flavor'",
    (23, "checkpointing"): "keep_top_k requires metric_name",
    (24, "profiling.steps"): "requires cluster.backend: in_process",
    (25, "logger.num_rollouts_logged"): "must be a whole number, 0 or more, or null; found -1",
}
IMPORTED = {(21, "env.game.max_rollout_turns"): "environment code_of_all_stages.LongerGame needs 3 to give a reward"}
DATA = {
    (18, "data"): "rows.jsonl:3: ",
    (20, "env.sums.reward_fn"): "requires 'answer'",
}


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    """Run the command on a config; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "code_of_all_stages.py").write_text(CODE)
    rows = [{"question": "1+2="}, {"question": "1+3="}, {"question": "1+4=" * 20}, {"question": "1+5="}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(config, *options):
        (tmp_path / "run.yaml").write_text(config)
        monkeypatch.setattr(sys, "argv", ["rlcore", "validate", "run.yaml", *options])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    yield run
    sys.modules.pop("code_of_all_stages", None)


def test_mistakes_in_all_sections_and_stages_are_reported_together(validate):
    code, output, _ = validate(CONFIG, "--deep", "--json")
    assert code == 2
    errors = json.loads(output)["errors"]
    found = {(error["line"], error["key"]): error["message"] for error in errors}
    for at, says in (STATIC | IMPORTED | DATA).items():
        assert says in found.get(at, ""), (at, found)
    assert {key.partition(".")[0] for _, key in found} >= {
        "grpo", "policy", "loss_fn", "rollout", "data", "env", "cluster", "checkpointing", "profiling", "logger"
    }  # fmt: skip
    assert all(error["file"].endswith("run.yaml") for error in errors)


def test_without_deep_the_mistakes_that_need_no_import_are_reported_together(validate):
    code, output, _ = validate(CONFIG, "--json")
    found = {(error["line"], error["key"]) for error in json.loads(output)["errors"]}
    assert code == 2
    assert found >= set(STATIC)
    assert not found & set(IMPORTED | DATA)


def test_a_rule_that_reads_an_invalid_key_is_listed_as_not_checked(validate):
    config = CONFIG.replace("max_total_sequence_length: 16", "max_total_sequence_length: many")
    _, output, _ = validate(config, "--json")
    report = json.loads(output)
    assert "policy.generation.max_new_tokens" not in {error["key"] for error in report["errors"]}
    assert (
        "not checked, because policy.max_total_sequence_length is invalid: The longest completion is shorter than a row of the "
        "policy." in report["not_checked"]
    )


def test_rules_that_were_not_checked_are_counted_in_the_text(validate):
    config = CONFIG.replace("max_total_sequence_length: 16", "max_total_sequence_length: many")
    _, output, _ = validate(config, "--json")
    total = len(json.loads(output)["not_checked"])
    assert total > 1
    _, _, printed = validate(config)
    assert printed.splitlines()[-1] == f"Because of these errors, {total} checks could not run; --json lists them."
    assert "not checked, because" not in printed


def test_a_default_is_not_judged_if_an_unknown_key_probably_means_it(validate):
    config = CONFIG.replace("max_new_tokens: 16", "max_new_token: 4")
    _, output, _ = validate(config, "--json")
    report = json.loads(output)
    assert [error["key"] for error in report["errors"] if "max_new_token" in error["key"]] == [
        "policy.generation.max_new_token"
    ]
    assert any("because policy.generation.max_new_tokens is invalid" in text for text in report["not_checked"])


def test_the_other_sections_are_checked_if_a_component_is_unknown_or_a_section_is_a_number(validate):
    config = CONFIG.replace("backend: hf\n  model", "backend: hff\n  model").replace("profiling: {steps: [9]}", "profiling: 9")
    _, output, _ = validate(config, "--json")
    report = json.loads(output)
    keys = {error["key"] for error in report["errors"]}
    assert keys >= {"policy.backend", "policy.generation.max_new_tokens", "profiling", "loss_fn.token_level_loss"}
    assert any("because policy.conflicts is invalid" in text for text in report["not_checked"])
    assert any("because profiling is invalid" in text for text in report["not_checked"])


def test_a_run_that_cannot_start_reports_the_same_mistakes(validate, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    with pytest.raises(InvalidConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert {(problem.location.line, ".".join(problem.path)) for problem in caught.value.problems} >= set(STATIC)
