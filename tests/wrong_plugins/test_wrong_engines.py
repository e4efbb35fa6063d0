"""`rlcore train` stops when its engine does not keep its promises, and the error names the engine and the promise."""

import json
import sys
from pathlib import Path

import pytest
from wrong_plugins.registry import ENGINES

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "training_checks"))

from short_runs import RUN, merged


@pytest.fixture
def train(rlcore, tmp_path, one_thread):
    """`rlcore train` with an engine of this folder: exit code, all output in one line, and the number of finished steps."""

    def run(name, changes=None):
        backend = {"policy": {"generation": {"backend": f"wrong_plugins.engines.{name}.Engine"}}}
        (tmp_path / "run.yaml").write_text(json.dumps(merged(merged(RUN, changes or {}), backend)))
        code, output = rlcore("train", str(tmp_path / "run.yaml"), folder=tmp_path)
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        return code, " ".join(output.split()), len(metrics.read_text().splitlines()) if metrics.exists() else 0

    return run


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.marker == "train"])
def test_a_wrong_engine_stops_the_run_within_three_steps(train, name):
    engine = ENGINES[name]
    code, output, steps = train(name, engine.changes)
    assert code in (1, 2), output
    assert steps < 3
    assert "Traceback" not in output
    assert name in output
    assert [words for words in engine.words if words not in output] == [], output


@pytest.mark.parametrize("name", ["right", *(name for name, engine in ENGINES.items() if engine.marker == "kit")])
def test_a_right_engine_trains_and_so_does_one_that_only_a_conformance_kit_can_find(train, name):
    code, output, steps = train(name)
    assert (code, steps) == (0, 3), output


def test_at_least_twenty_kinds_of_engines_are_wrong_and_eight_were_written_after_the_checks():
    folder = Path(__file__).parent / "engines"
    assert {file.stem for file in folder.glob("*.py")} - {"base", "right"} == ENGINES.keys()
    assert len(ENGINES) >= 20
    assert sum(engine.frozen for engine in ENGINES.values()) >= 8
