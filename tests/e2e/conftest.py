"""Whole runs of `rlcore train`, each in its own folder."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from e2e_runs import TINY, TrainingProcess, merged


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread):
    """One thread, because runs in this process and in others are compared bit for bit."""


@pytest.fixture
def train(tmp_path):
    """Start `rlcore train` with a changed tiny config; remaining processes are killed at the end."""
    started = []

    def start(changes=None, *arguments, folder=tmp_path, environment=None):
        folder.mkdir(exist_ok=True)
        run = TrainingProcess(folder, merged(TINY, changes or {}), *arguments, environment=environment)
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
