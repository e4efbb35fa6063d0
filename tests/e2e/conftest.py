"""Whole runs of `rlcore train`, each in a folder of its own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from e2e_runs import TINY, TrainingProcess, merged


@pytest.fixture
def train(tmp_path):
    """Start `rlcore train` on the tiny config, changed; whatever is left of it is ended."""
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
