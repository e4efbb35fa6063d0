"""A run with `rollout.max_staleness: 2` whose engine samples with its first weights stops before it trains on such tokens."""

import os
from pathlib import Path

import pytest
from e2e_runs import metrics_of

from rl_train.metrics.jsonl import read_jsonl

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("test_wrong_engines.py stops a synchronous run, test_older_weights.py tests when the canary runs"),
]
TESTS = Path(__file__).parents[1]
CONFIG = {
    "grpo": {"num_prompts_per_step": 8, "max_num_steps": 8, "adv_estimator": {"name": "reinforce_plus_plus"}},
    "policy": {
        "train_global_batch_size": 32,
        "optimizer": {"kwargs": {"lr": 0.01}},
        "scheduler": None,
        "generation": {"backend": "wrong_plugins.engines.keeps_its_first_weights.Engine"},
    },
    "loss_fn": {"ratio_to": "sampler"},
    "rollout": {"max_staleness": 2, "ahead": 2},
    "data": {"train": {"num_samples": 400}},
    "cluster": {"backend": "ray"},
    "checkpointing": {"enabled": False},
}


def test_no_token_that_a_wrong_engine_sampled_in_flight_is_trained(train, tmp_path):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    code, output = train(CONFIG, environment={"PYTHONPATH": path}).wait()
    assert code == 1, output
    assert "Traceback" not in output
    assert "nats on average" in output
    # The first weights are those of version 0, so tokens of every later version are wrong.
    trained = [step for step in metrics_of(tmp_path) if step > 0]
    assert len(trained) < 3
    rows = [row for step in trained for row in read_jsonl(tmp_path / f"runs/run/rollouts/step_{step:06d}.jsonl")]
    assert rows
    assert {version for row in rows for version in row["turn_versions"]} == {0}
    assert not any(row["token_versions"] for row in rows)
