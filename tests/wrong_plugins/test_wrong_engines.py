"""`rlcore train` stops when its engine does not keep its promises, and the error names the engine and the promise."""

import pytest
from wrong_plugins.registry import ENGINES


def section(name):
    return {"policy": {"generation": {"backend": f"wrong_plugins.engines.{name}"}}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if engine.marker == "train"])
def test_a_wrong_engine_stops_the_run_within_three_steps(train, name):
    engine = ENGINES[name]
    code, output, steps = train(section(name), engine.changes)
    assert code in (1, 2), output
    assert len(steps) < 3
    assert "Traceback" not in output
    assert name in output
    assert [words for words in engine.words if words not in output] == [], output


OF_THE_KIT = [name for name, engine in ENGINES.items() if engine.marker == "kit"]


@pytest.mark.parametrize(
    "name", ["Right", OF_THE_KIT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in OF_THE_KIT[1:])]
)
def test_a_right_engine_trains_and_so_does_one_that_only_a_conformance_kit_can_find(train, name):
    code, output, steps = train(section(name))
    assert (code, len(steps)) == (0, 3), output
