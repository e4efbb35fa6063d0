"""Checkpoints contain the canary error of the first sync, and a resumed run is compared with it."""

import json
from pathlib import Path

import pytest

from rl_core.errors import WeightSyncError
from rl_train.launch.train import train
from rl_train.weight_sync.canary import CanaryCalibration

MODEL = str(Path(__file__).parents[3] / "examples" / "addition" / "model")
CONFIG = {
    "grpo": {"max_num_steps": 2, "num_prompts_per_step": 2, "num_generations_per_prompt": 2},
    "policy": {
        "backend": "hf",
        "model_name": MODEL,
        "precision": "bfloat16",
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 16}},
    "env": {"arithmetic": {}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"save_period": 1, "keep_latest_k": 5},
}


@pytest.mark.slow
def test_a_resumed_run_takes_the_canarys_baseline_from_its_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**CONFIG, "logger": {"log_dir": str(tmp_path / "runs")}}))
    train(path, ["grpo.max_num_steps=1"], console=False)
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    first = json.loads(metrics.read_text().splitlines()[0])["refit/canary_error"]
    [state] = tmp_path.glob("runs/*/checkpoints/*/state.json")
    kept = json.loads(state.read_text())["algorithm"]["canary"]
    assert kept["error"] == first > 0
    assert "bfloat16" in kept["sides"]

    measured = []
    monkeypatch.setattr(CanaryCalibration, "record", lambda calibration, *found: measured.append(found))
    train(path, console=False)
    assert measured == []

    # An engine that is wrong from the resume on is not taken for the new baseline.
    monkeypatch.setattr(CanaryCalibration, "tolerance", lambda calibration, sides: calibration.error * 1e-3)
    with pytest.raises(WeightSyncError, match="log-probabilities"):
        train(path, ["grpo.max_num_steps=3"], console=False)
