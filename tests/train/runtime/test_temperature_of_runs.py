"""Algorithms that sample train at the sampling temperature; others do not."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.workers import Builder
from rl_train.config.loader import load_config
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

MODEL = str(Path(__file__).parents[3] / "examples" / "addition" / "model")
POLICY = {"backend": "hf", "model_name": MODEL, "max_total_sequence_length": 16}
COMMON = {"cluster": {"backend": "in_process"}, "checkpointing": {"enabled": False}}
SFT = {
    "sft": {"max_num_steps": 2, "global_batch_size": 8, "val_at_end": True, "val_accuracy": True},
    "policy": POLICY,
    "data": {
        "train": {"dataset_name": "arithmetic", "num_samples": 16, "with_response": True},
        "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation", "with_response": True},
    },
    "env": {"arithmetic": {}},
    **COMMON,
}


def written(folder, config, **sampling):
    generation = {"backend": "hf", "max_new_tokens": 5, **sampling}
    folder.mkdir()
    path = folder / "run.yaml"
    logger = {"log_dir": str(folder / "runs")}
    path.write_text(json.dumps({**config, "policy": {**config["policy"], "generation": generation}, "logger": logger}))
    return path


def steps_of(folder, config, **sampling):
    train(written(folder, config, **sampling), resume="never", console=False)
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_sft_trains_and_validates_at_temperature_1_with_any_sampling_temperature(tmp_path):
    names = ("loss", "grad_norm", "validation/loss")
    expected = steps_of(tmp_path / "one", SFT)
    # The engine really samples at 0.5: the canary compares it with the policy at that temperature.
    found = steps_of(tmp_path / "half", SFT, temperature=0.5, val_temperature=0.5)
    assert [[step.get(name) for name in names] for step in found] == [[step.get(name) for name in names] for step in expected]
    assert found[-1]["validation/loss"] > 0


@pytest.mark.parametrize(
    ("algorithm", "changes", "temperature"),
    [
        ("sft", {"sft": SFT["sft"], "data": SFT["data"]}, 1.0),
        ("grpo", {"grpo": {}}, 0.5),
        ("distillation", {"distillation": {}, "teacher": POLICY}, 0.5),
    ],
)
def test_policy_and_teacher_score_at_the_sampling_temperature_only_where_the_algorithm_samples(
    tmp_path, algorithm, changes, temperature
):
    data = {"train": {"dataset_name": "arithmetic", "num_samples": 16}}
    config = {"policy": POLICY, "data": data, "env": {"arithmetic": {}}, **COMMON, **changes}
    run = load_config(written(tmp_path / "run", config, temperature=0.5)).run
    assert run.scoring_temperature == temperature
    with ExitStack() as exits:
        builder = Builder(run=run, registry=Registry(discover()), exits=exits, cluster=None)
        made = [builder.policy(), *builder.companions().values()]
        assert [model.config.scoring_temperature for model in made] == [temperature] * len(made)
    with ExitStack() as exits:
        compared = Builder(run=run, registry=Registry(discover()), exits=exits, cluster=None, scoring_temperature=0.5)
        assert compared.policy().config.scoring_temperature == 0.5
