"""`rlcore train` of short runs."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from short_runs import RUN, merged


@pytest.fixture
def train(rlcore, tmp_path):
    """`rlcore train` of the run with changes: exit code, all output in one line, and the metrics of each step."""

    def run(changes=None, *arguments, base=None):
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(merged(base or RUN, changes or {})))
        code, output = rlcore("train", str(path), *arguments, folder=tmp_path)
        logs = sorted((tmp_path / "runs").glob("*/metrics.jsonl"), key=lambda log: log.stat().st_mtime)
        lines = logs[-1].read_text().splitlines() if logs else []
        return code, " ".join(output.split()), [json.loads(line) for line in lines]

    return run
