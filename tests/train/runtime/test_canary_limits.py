"""The canary's limit in runs with adapters: merged ones have no effect at the first sync, so it calibrates nothing."""

import json
from pathlib import Path

import pytest

from rl_train.assembly import weights
from rl_train.launch.train import train
from rl_train.weight_sync.canary import EXACT_TOLERANCE, FIRST_TOLERANCE

CONFIG = {
    "grpo": {"max_num_steps": 1, "num_prompts_per_step": 2, "num_generations_per_prompt": 2},
    "policy": {
        "backend": "hf",
        "model_name": str(Path(__file__).parents[3] / "examples" / "addition" / "model"),
        "max_total_sequence_length": 16,
        "generation": {"backend": "hf", "max_new_tokens": 5},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 16}},
    "env": {"arithmetic": {}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        pytest.param(["policy.generation.lora=merged"], FIRST_TOLERANCE, id="merged"),
        pytest.param(["policy.hf_cfg.lora.use_dora=true"], FIRST_TOLERANCE, id="DoRA, which is always merged"),
        pytest.param(["policy.generation.lora=merged", "policy.precision=float32"], EXACT_TOLERANCE, id="float32"),
        pytest.param(["policy.generation.lora=merged", "policy.generation.canary_tolerance=0.3"], 0.3, id="configured"),
        pytest.param(["policy.generation.lora=adapter"], None, id="adapter"),
        pytest.param(["policy.hf_cfg.lora=null"], None, id="all weights"),
    ],
)
def test_the_limit_is_calibrated_only_by_a_sync_that_shows_the_rounding_of_later_ones(tmp_path, monkeypatch, overrides, limit):
    made, make = [], weights.make_canary

    def recorded(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(weights, "make_canary", recorded)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**CONFIG, "logger": {"log_dir": str(tmp_path / "runs")}}))
    settings = ["policy.precision=bfloat16", "++policy.hf_cfg.lora.rank=2", *(f"++{each}" for each in overrides)]
    train(path, settings, resume="never", console=False)
    assert [canary.tolerance for canary in made] == [limit]
