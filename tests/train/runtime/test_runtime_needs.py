"""The runtime does what an algorithm declares, whatever its settings are called."""

import json
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.algorithm import RecordNeeds, RolloutNeeds, RuntimeNeeds
from rl_train.config.loader import load_config
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"

TRIALS = """
from pydantic import Field

from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig


class TrialsConfig(AlgorithmConfig):
    default_loss = "nll"

    questions: int = Field(default=3, ge=1)
    tries: int = 4
    tries_in_validation: int = 2

    @property
    def runtime_needs(self):
        rollouts = RolloutNeeds(prompts_per_draw=self.questions, samples_per_prompt=self.tries)
        return RuntimeNeeds(rollouts=rollouts, val_samples_per_prompt=self.tries_in_validation)


def train(config, run):
    for step in run.steps():
        run.weights.sync()
        batch = run.rollouts.take(step, config.questions).batch
        rows, _ = run.evaluation.evaluate()
        run.metrics.add({"trials/prompts": len(batch["group_ids"].unique()), "trials/rows": batch.size} | rows)


class UndeclaredConfig(AlgorithmConfig):
    default_loss = "nll"
    questions: int = 3


class IdleConfig(AlgorithmConfig):
    default_loss = "nll"

    @property
    def runtime_needs(self):
        return RuntimeNeeds()


def idle(config, run):
    for _ in run.steps():
        run.metrics.add({"idle/parts": sum(p is not None for p in (run.rollouts, run.batches, run.generation))})
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config of an algorithm given by import path; returns the path of the config with `changes` to its sections."""
    (tmp_path / "trials_by_path.py").write_text(TRIALS)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run.yaml"

    def write(**changes):
        sections = {
            "algorithm": {"train": "trials_by_path.train", "config": "trials_by_path.TrialsConfig"},
            "trials": {"max_num_steps": 1, "val_at_end": True},
            "policy": {
                "backend": "hf",
                "model_name": str(MODEL),
                "max_total_sequence_length": 16,
                "generation": {"backend": "hf", "max_new_tokens": 5, "val_temperature": 1.0},
            },
            "data": {
                "train": {"dataset_name": "arithmetic", "num_samples": 16},
                "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
            },
            "env": {"arithmetic": {}},
            "cluster": {"backend": "in_process"},
            "checkpointing": {"enabled": False},
            "logger": {"log_dir": str(tmp_path), "run_name": "run"},
        }
        sections |= changes
        path.write_text(json.dumps({name: section for name, section in sections.items() if section is not None}))
        return path

    return write


def metrics_of(path):
    train(path, resume="never", console=False)
    return json.loads((path.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_custom_algorithm_with_other_field_names_draws_the_prompts_and_samples_it_declares(config):
    row = metrics_of(config())
    assert (row["trials/prompts"], row["trials/rows"]) == (3, 12)
    assert row["validation/rows"] == 8 * 2


def test_an_algorithm_that_declares_no_rollouts_and_no_records_runs_without_data_and_engine(config):
    row = metrics_of(
        config(
            algorithm={"train": "trials_by_path.idle", "config": "trials_by_path.IdleConfig"},
            trials={"max_num_steps": 1},
            policy={"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
            data=None,
            env=None,
        )
    )
    assert row["idle/parts"] == 0


@pytest.mark.parametrize(
    ("algorithm", "environment", "turns"),
    [
        ({}, {}, 7),
        ({}, {"max_guesses": 4}, 4),
        ({"max_rollout_turns": None}, {"max_guesses": 4}, 4),
        ({"max_rollout_turns": 2}, {"max_guesses": 4}, 2),
        ({"max_rollout_turns": 2}, {"max_guesses": 4, "max_rollout_turns": 3}, 3),
    ],
)
def test_null_turns_are_as_many_as_the_environment_needs(config, algorithm, environment, turns):
    grpo = {"max_num_steps": 1, **algorithm}
    data = {"train": {"dataset_name": "guess"}}
    path = config(algorithm=None, trials=None, grpo=grpo, data=data, env={"guess": environment})
    assert load_config(path).run.max_turns == {"guess": turns}


@pytest.mark.parametrize(
    "declared",
    [
        lambda: RolloutNeeds(prompts_per_draw=0, samples_per_prompt=1),
        lambda: RolloutNeeds(prompts_per_draw=1, samples_per_prompt=0),
        lambda: RolloutNeeds(prompts_per_draw=1, samples_per_prompt=1, sampled_fraction=1.5),
        lambda: RecordNeeds(records_per_step=0),
        lambda: RuntimeNeeds(max_turns=0),
        lambda: RuntimeNeeds(val_samples_per_prompt=0),
        lambda: RuntimeNeeds(companions=("critic",)),
        lambda: RuntimeNeeds(
            rollouts=RolloutNeeds(prompts_per_draw=1, samples_per_prompt=1), records=RecordNeeds(records_per_step=1)
        ),
    ],
)
def test_runtime_requirements_that_cannot_be_met_are_errors(declared):
    with pytest.raises(ValueError, match=r"at least 1|from 0 to 1|rollouts or records|has critic: choose from value, teacher"):
        declared()


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("UndeclaredConfig", {}, "UndeclaredConfig must implement the property `runtime_needs`"),
        ("TrialsConfig", {"tries": 0}, "samples_per_prompt is 0: it must be at least 1"),
    ],
)
def test_an_algorithm_without_a_possible_declaration_is_refused_by_validation(config, model, settings, says):
    algorithm = {"train": "trials_by_path.train", "config": f"trials_by_path.{model}"}
    with pytest.raises(InvalidConfigError) as caught:
        load_config(config(algorithm=algorithm, trials={"max_num_steps": 1, **settings}))
    assert says in str(caught.value)
    assert "trials" in str(caught.value)
