"""A teacher frees its device memory before other components need it: the order of calls between real workers."""

import json
from pathlib import Path

import pytest

from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
SCORES = ("get_topk_logprobs", "get_logprobs")
ON_DEVICE = ("setup", *SCORES)
NEEDS_THE_DEVICE = ("generate", "train", "prepare_for_training", "prepare_for_generation")


@pytest.fixture
def calls(monkeypatch):
    """Records every worker call as (group, method) while the workers run."""
    made = []
    run = InProcessWorkerGroup._submit

    def recorded(group, method, *args, **kwargs):
        made.append((group._name, method))
        return run(group, method, *args, **kwargs)

    monkeypatch.setattr(InProcessWorkerGroup, "_submit", recorded)
    return made


@pytest.mark.parametrize("topk", [4, None])
def test_a_teacher_leaves_the_device_before_anybody_samples_or_trains(calls, tmp_path, topk):
    config = {
        "distillation": {"num_prompts_per_step": 8, "max_num_steps": 2, "val_at_end": True},
        "loss_fn": {"divergence": "reverse_kl", "topk": topk},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 5, "val_temperature": 1.0},
        },
        "teacher": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 16},
            "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
        },
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", console=False)
    on_device = False
    scored = used = 0
    for group, method in calls:
        if group == "teacher" and method in ON_DEVICE:
            on_device, scored = True, scored + (method in SCORES)
        elif group == "teacher" and method == "offload_after_refit":
            on_device = False
        elif group != "teacher" and method in NEEDS_THE_DEVICE:
            used += 1
            assert not on_device, f"{group}.{method} while the teacher is on the device"
    # Two steps and a validation.
    assert scored == 3
    assert used >= 6
    assert not on_device
