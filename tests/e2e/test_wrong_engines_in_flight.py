"""A run with `rollout.max_staleness: 2` whose engine is wrong stops before it trains on what the engine sampled wrongly.

The engine is far ahead of training, so that most batches have no token of the current weights, which would be compared.
"""

import os
from pathlib import Path

import pytest
from e2e_runs import merged, metrics_of
from wrong_plugins.registry import ENGINES

from rl_train.metrics.jsonl import read_jsonl

pytestmark = pytest.mark.ray
TESTS = Path(__file__).parents[1]
CONFIG = {
    "grpo": {"num_prompts_per_step": 8, "max_num_steps": 8, "adv_estimator": {"name": "reinforce_plus_plus"}},
    "policy": {"train_global_batch_size": 32, "optimizer": {"kwargs": {"lr": 0.01}}, "scheduler": None},
    "loss_fn": {"ratio_to": "sampler"},
    "rollout": {"max_staleness": 2, "ahead": 2},
    "data": {"train": {"num_samples": 400}},
    "cluster": {"backend": "ray", "cpus_per_worker": 1},  # each has a core, so policy and engine do not take turns
    "checkpointing": {"enabled": False},
}


def run_with(train, engine, tmp_path):
    """Output of a run with one of `wrong_plugins.engines`, and its rollouts that were trained."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    section = {"policy": {"generation": {"backend": f"wrong_plugins.engines.{engine}"}}}
    code, output = train(merged(CONFIG, section), environment={"PYTHONPATH": path}).wait()
    assert code == 1, output
    assert "Traceback" not in output
    assert "nats on average" in output
    assert engine in output
    if ENGINES[engine].marker == "flight":
        assert all(words in output for words in ENGINES[engine].words), output
    trained = [step for step in metrics_of(tmp_path) if step > 0]
    assert len(trained) < 3
    return output, [row for step in trained for row in read_jsonl(tmp_path / f"runs/run/rollouts/step_{step:06d}.jsonl")]


@pytest.mark.full("test_an_engine_that_streams_older_weights_is_stopped in this file")
def test_no_token_that_a_wrong_engine_sampled_in_flight_is_trained(train, tmp_path):
    _, rows = run_with(train, "KeepsItsFirstWeights", tmp_path)
    # The first weights are those of version 0, so tokens of every later version are wrong.
    assert rows
    assert {version for row in rows for version in row["turn_versions"]} == {0}
    assert not any(row["token_versions"] for row in rows)


@pytest.mark.slow
def test_an_engine_that_streams_older_weights_is_stopped(train, tmp_path):
    _, rows = run_with(train, "StreamsFromItsFirstWeights", tmp_path)
    assert {version for row in rows for version in row["turn_versions"]} == {0}


@pytest.mark.full("test_an_engine_that_streams_older_weights_is_stopped in this file")
def test_an_engine_that_keeps_keys_and_values_of_older_weights_is_stopped(train, tmp_path):
    run_with(train, "KeepsKeysAndValues", tmp_path)
