"""Runs of 500 steps, with validation and checkpoints: once warmed up, the memory of a run's processes does not grow."""

from statistics import median

import psutil
import pytest
from e2e_runs import TrainingProcess

STEPS, PERIOD, WARM_UP = 500, 25, 100
GROWTH = 1.02
"""Largest ratio of the medians of the last and first quarter of the samples after the warm-up."""
CONFIG = {
    "grpo": {"max_num_steps": STEPS, "val_period": PERIOD},
    "policy": {"scheduler": {"kwargs": {"num_training_steps": None}}},
    "data": {
        "train": {"num_samples": 400},
        "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
    },
    "checkpointing": {"save_period": PERIOD, "keep_latest_k": 1},
}


def memory_of(run: TrainingProcess) -> int:
    """The resident memory of all processes of a run, in bytes."""
    total = 0
    for process in run.descendants():
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it ended after it was listed
            continue
    return total


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cluster": {"backend": "in_process"}}, id="in process"),
        pytest.param(
            {"cluster": {"backend": "ray"}, "loss_fn": {"ratio_to": "sampler"}, "rollout": {"max_staleness": 2, "ahead": 2}},
            id="asynchronous over Ray",
            marks=pytest.mark.ray,
        ),
    ],
)
@pytest.mark.full("500 steps take minutes; no shorter run tells growth from warming up")
def test_memory_does_not_grow_over_500_steps(train, tmp_path, changes):
    run = train(CONFIG | changes)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    used = []
    for step in range(WARM_UP, STEPS, PERIOD):
        run.wait_for(lambda step=step: metrics.exists() and metrics.read_text().count("\n") > step, timeout=600)
        used.append(memory_of(run))
    code, output = run.wait()
    assert code == 0, output
    quarter = len(used) // 4
    first, last = median(used[:quarter]), median(used[-quarter:])
    assert last <= GROWTH * first, f"MiB every {PERIOD} steps: {[size >> 20 for size in used]}"
