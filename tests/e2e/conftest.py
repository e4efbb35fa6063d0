"""Whole runs of `rlcore train`, each in its own folder."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from e2e_runs import HELD, SLOW_TURNS, TINY, TrainingProcess, merged


@pytest.fixture
def train(tmp_path):
    """Start `rlcore train` with a changed tiny config; remaining processes are killed at the end."""
    started = []

    def start(changes=None, *arguments, folder=tmp_path, **settings):
        folder.mkdir(exist_ok=True)
        run = TrainingProcess(folder, merged(TINY, changes or {}), *arguments, **settings)
        started.append(run)
        return run

    yield start
    for run in started:
        for process in run.descendants():
            process.kill()
        run.process.wait()
        run.log.close()


@pytest.fixture
def train_here(rlcore, tmp_path):
    """`rlcore train` with a changed tiny config in this process: exit code and all output."""

    def run(changes=None, *arguments, folder=tmp_path):
        folder.mkdir(exist_ok=True)
        path = folder / "run.yaml"
        path.write_text(json.dumps(merged(TINY, changes or {})))
        return rlcore("train", str(path), *arguments, folder=folder)

    return run


@pytest.fixture
def held(train, tmp_path):
    """Starts or resumes a run whose n-th step from there waits for `let_go`."""

    class Held:
        def __init__(self):
            (tmp_path / "held_environment.py").write_text(HELD)
            section = {"env_cls": "held_environment.HeldEnvironment", "num_workers": 1, "folder": str(tmp_path)}
            self.environment = {"env": {"arithmetic": section}}

        def __call__(self, step, changes):
            (tmp_path / "held").unlink(missing_ok=True)
            (tmp_path / "hold").write_text(str(step))
            return train(merged(changes, self.environment))

        def waits(self):
            return (tmp_path / "held").exists()

        def let_go(self):
            (tmp_path / "hold").unlink()

    return Held()


@pytest.fixture
def slow_turns(tmp_path):
    """Makes the config of an asynchronous run with `SLOW_TURNS`, two policy ranks and two replicas."""
    (tmp_path / "slow_turns.py").write_text(SLOW_TURNS)

    def make(steps, **environment):
        section = {"env_cls": "slow_turns.SlowTurns", "num_workers": 2, **environment}
        return {
            "grpo": {"max_num_steps": steps, "max_rollout_turns": 2, "val_period": 1, "val_at_start": False},
            "policy": {
                "max_total_sequence_length": 40,
                "scheduler": {"kwargs": {"num_training_steps": None}},
                "generation": {"max_restarts": 100},
            },
            "cluster": {"workers_per_node": 2},
            "loss_fn": {"ratio_to": "sampler"},
            "rollout": {"max_staleness": 2, "ahead": 2, "retries": 4},
            "data": {
                "train": {"num_samples": 400},
                "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
            },
            "env": {"arithmetic": section},
            "checkpointing": {"save_period": 1},
        }

    return make
