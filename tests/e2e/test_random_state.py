"""Runs with equal configs are equal, also with dropout and with a policy that draws from global generators; so are resumes."""

import json
import shutil

import pytest
from e2e_runs import MODEL, merged, reproducible_metrics_of

from rl_train.launch.train import train

DRAWS = """
import random
import numpy, torch
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.policy import HuggingFacePolicy

class DrawingPolicy(HuggingFacePolicy):
    '''Written elsewhere; it draws from the generators of the process and does not save their states.'''

    def __init__(self, *, config, cluster=None, deadlines=None):
        super().__init__(config=HFPolicyConfig.model_validate(config.model_dump()), cluster=cluster, deadlines=deadlines)

    def train(self, data, loss_fn, **options):
        result = super().train(data, loss_fn, **options)
        draws = {"draw/python": random.random(), "draw/numpy": float(numpy.random.rand()), "draw/torch": float(torch.rand(()))}
        return {**result, "metrics": {**result["metrics"], **draws}}

    def load_checkpoint(self, weights_path, optimizer_path=None, **kwargs):
        states = random.getstate(), torch.get_rng_state()
        super().load_checkpoint(weights_path, optimizer_path, **kwargs)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
"""
SFT = {
    "sft": {"global_batch_size": 8, "max_num_steps": 2, "seed": 5},
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        "hf_cfg": {"lora": {"rank": 4, "dropout": 0.5}},
        "optimizer": {"kwargs": {"lr": 1.0e-3}},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
    "checkpointing": {"save_period": 1, "keep_latest_k": 2},
}
IN_PROCESS = {"cluster": {"backend": "in_process"}, "policy": {"backend": "drawing_policy.DrawingPolicy"}}
TWO_RANKS = {"cluster": {"backend": "ray", "workers_per_node": 2}}


@pytest.fixture
def run_twice(tmp_path, monkeypatch):
    """Runs a config twice, resumes a copy of the first run after its first step, and runs it with another seed."""
    (tmp_path / "drawing_policy.py").write_text(DRAWS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(changes):
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(merged(SFT, merged(changes, {"logger": {"log_dir": str(tmp_path / "runs")}}))))
        first = train(path, console=False).folder
        stopped = tmp_path / "runs" / "stopped"
        shutil.copytree(first / "checkpoints" / "step_000001", stopped / "checkpoints" / "step_000001")
        shutil.copy(first / "metrics.jsonl", stopped)
        train(path, console=False, resume=str(stopped))
        names = [train(path, overrides, console=False, resume="never").folder.name for overrides in ((), ("sft.seed=6",))]
        return [reproducible_metrics_of(tmp_path, name) for name in (first.name, "stopped", *names)]

    return run


@pytest.mark.parametrize("changes", [IN_PROCESS, TWO_RANKS], ids=["in_process", "two ranks"])
def test_equal_configs_draw_equal_numbers_and_a_resumed_run_continues_them(run_twice, changes, local_ray):
    first, resumed, again, other_seed = run_twice(changes)
    assert first == again
    assert first == resumed
    drawn = [key for key in first[1] if key.startswith(("draw/", "grad_norm"))]
    assert len(drawn) == (4 if changes is IN_PROCESS else 1)
    for key in drawn:
        assert first[1][key] != first[2][key], key
        assert first[1][key] != other_seed[1][key], key
