"""Runs with `rollout.max_staleness: 2`, two policy ranks and two replicas: environments that fail, and validation scores."""

import json

import pytest
from e2e_runs import checkpoint_of, metrics_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.full("test_asynchronous_runs.py has a run of several turns, test_failures.py failing environments"),
]


def test_an_environment_that_never_responds_costs_only_its_rows(train, slow_turns, tmp_path):
    changes = slow_turns(4, hangs=True, step_timeout_s=3.0)
    run = train({**changes, "rollout": {**changes["rollout"], "retries": 0, "max_failed_share": 1.0}})
    code, output = run.wait(900)
    run.assert_gone()
    assert code == 0, output
    assert any(row.get("rollout/failed_rows", 0) > 0 for row in metrics_of(tmp_path).values())


def test_a_task_in_which_every_rollout_fails_ends_with_its_error(train, slow_turns, tmp_path):
    run = train(slow_turns(4, fails=True))
    code, output = run.wait()
    run.assert_gone()
    assert code == 1
    assert "could not be scored" in output or "could be scored" in output
    assert "ConnectionError: the service does not respond" in output


def test_validation_scores_are_those_of_an_evaluation_of_the_checkpoint(train, slow_turns, tmp_path, rlcore):
    code, output = train(slow_turns(3)).wait()
    assert code == 0, output
    for step in (1, 3):
        result = tmp_path / f"eval_{step}.json"
        options = ("--checkpoint", str(checkpoint_of(step, tmp_path)), "--json", str(result))
        code, output = rlcore("eval", str(tmp_path / "run.yaml"), *options, folder=tmp_path)
        assert code == 0, output
        [mode] = json.loads(result.read_text())["modes"]
        assert metrics_of(tmp_path)[step]["validation/reward"] == pytest.approx(
            mode["all"]["metrics"]["reward"]["value"], abs=1e-6
        )
