"""A run that is stopped in any way and resumed equals an uninterrupted one bit for bit, and leaves no process."""

import json
import os
import random
import signal
import time

import pytest
from e2e_runs import TINY, TrainingProcess, checkpoint_of, merged, metrics_of, reproducible_metrics_of

pytestmark = pytest.mark.slow

EIGHT_STEPS = {"grpo": {"max_num_steps": 8}}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """A run of eight steps in progress."""
    run = TrainingProcess(tmp_path_factory.mktemp("never_stopped"), merged(TINY, EIGHT_STEPS))
    yield run
    for process in run.descendants():
        process.kill()
    run.process.wait()
    run.log.close()


def newest_step(folder):
    path = folder / "runs" / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def status_of(folder):
    return json.loads((folder / "runs" / "run" / "status.json").read_text())


@pytest.mark.full(
    "test_ppo.py kills and resumes a run, test_stopped_runs.py stops one over Ray; core/cluster/test_no_orphans.py"
)
def test_killed_and_interrupted_runs_resume_to_the_result_of_an_uninterrupted_run(never_stopped, held, tmp_path):
    at, pause = random.choice((2, 4)), random.random()
    run = held(5, EIGHT_STEPS)
    run.wait_for(checkpoint_of(at, tmp_path).is_dir)
    time.sleep(pause)  # somewhere in the middle of a step, of the fifth at the latest
    run.kill()
    run.process.wait()
    run.assert_gone()
    held.let_go()
    situation = f"killed after step {at} and {pause:.3f} s"

    run = held(2, EIGHT_STEPS)
    run.wait_for(held.waits)
    [worker] = status_of(tmp_path)["workers"]["policy"]
    os.kill(worker, signal.SIGKILL)
    held.let_go()
    code, output = run.wait()
    assert code == 1, (situation, output)
    assert "'policy'" in output
    assert "rank 0" in output
    run.assert_gone()
    assert status_of(tmp_path)["state"] == "failed"

    run = held(2, EIGHT_STEPS)
    run.wait_for(held.waits)
    run.kill(signal.SIGINT)
    held.let_go()
    code, output = run.wait()
    assert code == 130, (situation, output)
    run.assert_gone()
    done = newest_step(tmp_path)
    assert checkpoint_of(done, tmp_path).is_dir(), output

    run = held(9, EIGHT_STEPS)
    code, output = run.wait()
    assert code == 0, (situation, output)
    assert f"{done} steps done" in output
    run.assert_gone()
    code, output = never_stopped.wait()
    assert code == 0, output
    never_stopped.assert_gone()
    assert reproducible_metrics_of(tmp_path) == reproducible_metrics_of(never_stopped.folder), situation


def test_resuming_with_another_config_needs_a_flag_but_a_longer_run_does_not(train_here, tmp_path):
    in_process = {"cluster": {"backend": "in_process"}}
    code, output = train_here({**in_process, "grpo": {"max_num_steps": 2}})
    assert code == 0, output
    code, output = train_here({**in_process, "grpo": {"max_num_steps": 4, "num_prompts_per_step": 6}})
    assert code == 2, output
    assert "grpo.num_prompts_per_step: 4 then, 6 now" in output
    assert "Traceback" not in output
    code, output = train_here({**in_process, "grpo": {"max_num_steps": 4}})
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3, 4]
    changed = {**in_process, "grpo": {"max_num_steps": 5, "num_prompts_per_step": 6}}
    code, output = train_here(changed, "--allow-config-change")
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2, 3, 4, 5]
    code, output = train_here({**in_process, "grpo": {"max_num_steps": 2}}, "--resume", "never")
    assert code == 0, output
    assert sorted(metrics_of(tmp_path, "run-2")) == [1, 2]
