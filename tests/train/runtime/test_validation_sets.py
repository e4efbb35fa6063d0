"""Several validation sets in one run: their metrics, periods and environments, and the checkpoint that one of them chooses."""

import json
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_train.checkpoints.store import CheckpointStore
from rl_train.evaluation.evaluate import plan_evaluation
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples/addition/model"
SETS = {
    "easy": {"dataset_name": "arithmetic", "num_samples": 24, "split": "validation", "min_digits": 2, "val_period": 1},
    "hard": {"dataset_name": "arithmetic", "num_samples": 4, "split": "validation", "min_digits": 2, "task_name": "sums"},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    sections = {
        "grpo": {
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 4,
            "max_num_steps": 3,
            "val_period": 2,
            "val_at_start": True,
            "seed": 1,
        },
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 5},
            # Large steps, so that the accuracy changes at every step.
            "optimizer": {"kwargs": {"lr": 0.001}},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 64, "min_digits": 2},
            "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
            "validation_sets": SETS,
        },
        "env": {"arithmetic": {}, "sums": {"name": "arithmetic"}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 1, "metric_name": "validation/easy/accuracy", "keep_top_k": 1, "keep_latest_k": 1},
        "logger": {"log_dir": str(folder), "run_name": "run"},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(sections))
    return path


@pytest.fixture(scope="module")
def lines(config):
    train(config, resume="never", console=False)
    rows = [json.loads(line) for line in (config.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


@pytest.mark.slow
def test_each_set_is_validated_at_its_own_period_and_all_at_the_start(lines):
    found = {
        name: [step for step, row in sorted(lines.items()) if f"validation/{prefix}rows" in row]
        for name, prefix in (("validation", ""), ("easy", "easy/"), ("hard", "hard/"))
    }
    assert found == {"validation": [0, 2], "easy": [0, 1, 2, 3], "hard": [0, 2]}
    rows = [lines[0][f"validation/{prefix}rows"] for prefix in ("", "easy/", "hard/")]
    assert rows == [8, 24, 4]


def test_the_metrics_of_a_set_are_those_of_an_evaluation_on_it(config, lines):
    plan = plan_evaluation(config, validation_set="easy")
    [evaluated] = plan.evaluate().passes
    assert evaluated.scores.num_prompts == 24
    assert lines[0]["validation/easy/reward"] == pytest.approx(evaluated.scores.metrics["reward"].value)


def test_the_best_checkpoint_is_chosen_by_the_metric_of_a_named_set(config, lines):
    best = max(range(1, 4), key=lambda step: (lines[step]["validation/easy/accuracy"], step))
    assert best != 3, {step: lines[step]["validation/easy/accuracy"] for step in range(1, 4)}
    assert CheckpointStore(config.parent / "run" / "checkpoints").steps() == sorted({best, 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_sets": {"a/b": SETS["easy"]}}, "data.validation_sets"),
        ({"train": {"dataset_name": "arithmetic", "val_period": 2}}, "train.val_period has no effect"),
        ({"validation_sets": {"easy": {**SETS["easy"], "weight": 2}}}, "validation_sets.easy.weight has no effect"),
        ({"validation_sets": {"easy": {**SETS["easy"], "nun_samples": 3}}}, "Did you mean 'num_samples'?"),
    ],
)
def test_a_wrong_set_is_rejected(config, tmp_path, change, message):
    sections = json.loads(config.read_text())
    sections["data"] |= change
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(sections))
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        train(path, resume="never", console=False)


def test_an_unknown_set_of_an_evaluation_is_named(config):
    with pytest.raises(ConfigError, match=r"--validation-set eazy: data.validation_sets has easy, hard. Did you mean 'easy'\?"):
        plan_evaluation(config, validation_set="eazy")
