"""`rlcore train` with one wrong plugin."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "training_checks"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from short_runs import RUN, merged


@pytest.fixture
def train(rlcore, tmp_path):
    """`rlcore train` of a short run with changes: exit code, all output in one line, and the metrics of each step."""

    def run(*changes):
        config = RUN
        for change in changes:
            config = merged(config, change)
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return code, " ".join(output.split()), [json.loads(line) for line in lines]

    return run
