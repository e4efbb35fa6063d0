"""`rlcore train` stops, or `rlcore check env` fails, when an environment does not keep its promises."""

import json

import pytest
from typer.testing import CliRunner
from wrong_plugins.registry import ENVIRONMENTS

from rlcore_cli.main import app


def section(name):
    """A run of two turns with an environment of this folder."""
    return {
        "grpo": {"max_rollout_turns": 2},
        "policy": {"max_total_sequence_length": 32},
        "env": {"arithmetic": {"env_cls": f"wrong_plugins.environments.{name}"}},
    }


@pytest.fixture
def check(tmp_path):
    """The results of `rlcore check env`, and the names of the checks that failed."""

    def run(name):
        rows = [{"prompt": f"{number}+2=", "expected_answer": str(number + 2)} for number in range(4)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            "check",
            "env",
            f"wrong_plugins.environments.{name}",
            "--rows",
            str(tmp_path / "rows.jsonl"),
            "--json",
        ]
        done = CliRunner().invoke(app, words)
        return done.exit_code, done.output

    return run


@pytest.mark.parametrize("name", [name for name, wrong in ENVIRONMENTS.items() if wrong.marker == "train"])
def test_a_wrong_environment_stops_the_run_in_its_first_step(train, name):
    code, output, steps = train(section(name))
    assert code in (1, 2), output
    assert steps == []
    assert "Traceback" not in output
    assert name in output
    assert [words for words in ENVIRONMENTS[name].words if words not in output] == [], output


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_check_env_finds_every_wrong_environment(check, name):
    code, output = check(name)
    assert code in (1, 2), output
    if ENVIRONMENTS[name].marker == "check":
        assert [words for words in ENVIRONMENTS[name].words if words not in output] == [], output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Right", *(name for name, wrong in ENVIRONMENTS.items() if wrong.marker == "check")])
def test_a_right_environment_trains_and_so_does_one_that_only_check_env_can_find(train, name):
    code, output, steps = train(section(name))
    assert (code, len(steps)) == (0, 3), output


def test_a_right_environment_passes_check_env(check):
    code, output = check("Right")
    assert code == 0, output
