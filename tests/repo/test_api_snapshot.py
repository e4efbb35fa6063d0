"""The public API: a name or signature that the snapshot lists cannot be removed or changed without an update of the file."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("make_api_snapshot", DOCS / "make_api_snapshot.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_nothing_public_was_removed_or_changed_without_an_announcement(script):
    broken = script.breaks(script.SNAPSHOT.read_text(), script.api_snapshot())
    advice = "docs/api_policy.md says how to announce this; python docs/make_api_snapshot.py then updates the snapshot"
    assert broken == [], advice


def test_a_new_required_argument_and_a_removed_method_are_breaks(script):
    class Before:
        def step(self, rows, *, seed=0): ...

        def close(self): ...

    class After:
        def step(self, rows, state, *, seed=1): ...

    before, after = ("\n".join(script._describe("Game", game)) for game in (Before, After))
    assert script.breaks(before, after) == ["Game.close(self)", "Game.step(self, rows, *, seed=...)"]


def test_the_snapshot_has_hooks_interfaces_config_keys_and_capabilities(script):
    lines = script.SNAPSHOT.read_text().splitlines()
    assert "rlcore_step_finished(run, step, metrics)" in lines
    assert "rl_train.metrics.logger.Logger.log_metrics(self, metrics, step) (abstract)" in lines
    assert "rl_core.config.schema.PolicyConfig.model_name (required)" in lines
    assert "Capability.ASYNC_ROWS = 'async_rows'" in lines
