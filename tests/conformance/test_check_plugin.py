"""`rlcore check plugin`: components that cannot be created with their default configs."""

import json
import subprocess
from importlib.metadata import entry_points

import pytest
from command_line import rlcore
from network_nodes import SCRIPTS

from rl_core.testing.promises import Status


@pytest.mark.parametrize(
    ("component", "missing"),
    [
        ("environment:math", "there are no rows to step with. Set `rows` of the test class"),
        ("environment:gymnasium", "config.id is required"),
        ("generation:openai", "config.openai_cfg is required"),
    ],
)
def test_a_component_that_needs_a_config_or_rows_is_reported_as_not_tested(component, missing):
    done = rlcore("check", "plugin", component)
    assert done.returncode == 0, done.stdout
    assert f"{component.partition(':')[2]!r}: not tested with its default config:\n{missing}" in done.stdout
    assert done.stdout.count(missing) == 1
    assert "Test it with `pytest tests/test_conformance.py`" in done.stdout
    assert "does not keep a promise" not in done.stdout
    records = json.loads(rlcore("check", "plugin", component, "--json").stdout)
    assert {record["status"] for record in records} == {Status.NOT_CHECKED}


def test_a_component_that_cannot_be_created_is_reported_once():
    done = rlcore("check", "plugin", "environment:no_such_game")
    assert done.returncode == 1
    assert done.stdout.count("No environment named 'no_such_game'") == 1
    assert "0 of 14 promises kept; 13 not checked: the component could not be created" in done.stdout


@pytest.mark.parametrize("component", ["environment:guess", "logger:wandb", "dataset:guess"])
def test_a_component_is_tested_with_its_default_config(component):
    done = rlcore("check", "plugin", component)
    assert done.returncode == 0, done.stdout
    assert "promises kept" in done.stdout


@pytest.mark.slow
def test_a_policy_of_several_ranks_is_reported_as_tested_on_one():
    done = rlcore("check", "plugin", "policy:hf")
    assert done.returncode == 0, done.stdout
    assert "`multiple_ranks` is declared, but was not tested: run `pytest --ray` in its repository" in done.stdout


def test_a_plugin_is_tested_as_a_package():
    done = rlcore("check", "plugin", "rlcore")
    assert (done.returncode, done.stdout) == (0, "plugin 'rlcore': 10 of 10 promises kept\n")


@pytest.mark.slow
@pytest.mark.parametrize("plugin", sorted({entry.name for entry in entry_points(group="rl_core.plugins")} - {"core"}))
def test_an_installed_plugin_is_tested_with_all_its_components(plugin):
    """`core` registers nothing."""
    command = [SCRIPTS / "rlcore", "check", "plugin", plugin]  # a new interpreter: components may start process groups
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"plugin '{plugin}': 10 of 10 promises kept\n")
