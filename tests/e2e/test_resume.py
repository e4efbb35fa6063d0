"""A run that is killed and resumed equals, bit for bit, one that was never stopped; nothing outlives it."""

import json
import os
import random
import signal
import time

import pytest
from e2e_runs import metrics_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """The metrics of a run of eight steps."""
    from e2e_runs import TINY, TrainingProcess, merged

    folder = tmp_path_factory.mktemp("never_stopped")
    run = TrainingProcess(folder, merged(TINY, {"grpo": {"max_num_steps": 8}}))
    code, output = run.wait()
    assert code == 0, output
    run.assert_gone()
    return metrics_of(folder)


def newest_step(folder):
    path = folder / "runs" / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_kill_9_of_the_driver_then_resume_equals_never_stopped(train, tmp_path, never_stopped):
    at, pause = random.randint(2, 6), random.random()
    run = train({"grpo": {"max_num_steps": 8}})
    run.wait_for(lambda: newest_step(tmp_path) >= at)
    time.sleep(pause)  # somewhere in the middle of a step
    run.kill()
    run.process.wait()
    run.assert_gone()
    again = train({"grpo": {"max_num_steps": 8}})
    code, output = again.wait()
    assert code == 0, output
    again.assert_gone()
    assert metrics_of(tmp_path) == never_stopped, f"killed after step {at} and {pause:.3f} s"


def test_kill_9_of_a_policy_worker_names_it_and_resume_equals_never_stopped(train, tmp_path, never_stopped):
    run = train({"grpo": {"max_num_steps": 8}})
    run.wait_for(lambda: newest_step(tmp_path) >= 3)
    [worker] = json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["workers"]["policy"]
    os.kill(worker, signal.SIGKILL)
    code, output = run.wait()
    assert code == 1, output
    assert "'policy'" in output
    assert "rank 0" in output
    run.assert_gone()
    assert json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["state"] == "failed"
    code, output = train({"grpo": {"max_num_steps": 8}}).wait()
    assert code == 0, output
    assert metrics_of(tmp_path) == never_stopped


def test_ctrl_c_finishes_the_step_with_a_checkpoint_and_the_same_command_goes_on(train, tmp_path, never_stopped):
    run = train({"grpo": {"max_num_steps": 8}})
    run.wait_for(lambda: newest_step(tmp_path) >= 3)
    run.kill(signal.SIGINT)
    code, output = run.wait()
    assert code == 130, output
    run.assert_gone()
    done = newest_step(tmp_path)
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{done:06d}").is_dir()
    code, output = train({"grpo": {"max_num_steps": 8}}).wait()
    assert code == 0, output
    assert f"{done} steps done" in output
    assert metrics_of(tmp_path) == never_stopped


def test_another_config_is_refused_unless_told_and_a_longer_run_goes_on(train, tmp_path):
    in_process = {"cluster": {"backend": "in_process"}, "env": {"arithmetic": {"num_workers": 1}}}
    code, output = train({**in_process, "grpo": {"max_num_steps": 2}}).wait()
    assert code == 0, output
    code, output = train({**in_process, "grpo": {"max_num_steps": 4, "num_prompts_per_step": 6}}).wait()
    assert code == 2
    assert "grpo.num_prompts_per_step: 4 then, 6 now" in output
    assert "Traceback" not in output
    code, output = train({**in_process, "grpo": {"max_num_steps": 4}}).wait()
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3, 4]
    code, output = train(
        {**in_process, "grpo": {"max_num_steps": 5, "num_prompts_per_step": 6}}, "--allow-config-change"
    ).wait()
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3, 4, 5]
    code, output = train({**in_process, "grpo": {"max_num_steps": 2}}, "--resume", "never").wait()
    assert code == 0, output
    assert sorted(metrics_of(tmp_path, "run-2")) == [1, 2]
