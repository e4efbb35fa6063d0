"""A run over Ray saves a checkpoint when it is interrupted; if a policy worker or Ray dies, the error names it."""

import json
import os
import signal
import threading
import time

import psutil
import pytest

pytestmark = pytest.mark.slow


def steps_of(folder):
    path = folder / "runs" / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def status_of(folder):
    return json.loads((folder / "runs" / "run" / "status.json").read_text())


LONG = {
    "grpo": {"max_num_steps": 500},
    "policy": {"scheduler": None},
    "checkpointing": {"save_period": 400, "keep_latest_k": 2},
}


def kill_after(step, folder):
    """A thread that kills the policy worker of the run after a later step, and the pids of all its workers by then."""
    workers = {}

    def kill():
        until = time.monotonic() + 300
        while steps_of(folder) <= step and time.monotonic() < until:
            time.sleep(0.02)
        workers.update(status_of(folder)["workers"])
        os.kill(workers["policy"][0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread, workers


def test_ctrl_c_saves_a_checkpoint_and_leaves_no_process(train, tmp_path):
    stop_by_ctrl_c(train(LONG), tmp_path)


def stop_by_ctrl_c(run, tmp_path):
    """The number of steps of a run that Ctrl-C stopped in order."""
    run.wait_for(lambda: steps_of(tmp_path) >= 1)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does; Ray's daemons must live until the checkpoint is written
    code, output = run.wait()
    assert code == 130, output
    done = steps_of(tmp_path)
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{done:06d}").is_dir(), output
    assert status_of(tmp_path).items() >= {"state": "interrupted", "reason": "Ctrl-C"}.items()
    run.assert_gone()
    return done


@pytest.mark.full("the test before this one interrupts a run; backends_megatron/test_ray_ranks.py kills a rank in a step")
def test_a_resumed_run_names_the_policy_worker_that_dies(train, train_here, tmp_path, local_ray):
    done = stop_by_ctrl_c(train(LONG), tmp_path)
    thread, workers = kill_after(done, tmp_path)
    # The checkpoint is found although the workers of the shared Ray have another working directory.
    code, output = train_here(LONG)
    thread.join()
    assert code == 1, output
    assert f"{done} steps done" in output
    said = " ".join(output.split())
    [worker] = workers["policy"]
    assert f"rank 0 (data=0) of 'policy', host {os.uname().nodename}, pid {worker}" in said
    assert "Traceback" not in output
    assert status_of(tmp_path)["state"] == "failed"
    pids = [pid for group in workers.values() for pid in group]
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=120)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.full("the first test here interrupts a run; core/cluster/test_dead_daemons.py kills the daemons under a driver")
def test_sigterm_to_the_process_group_saves_and_a_resumed_run_names_the_ray_daemon_that_dies(train, tmp_path):
    run = train(LONG)
    run.wait_for(lambda: steps_of(tmp_path) >= 1)
    os.killpg(run.process.pid, signal.SIGTERM)  # as `timeout` does; Ray's daemons must live until the checkpoint is written
    code, output = run.wait()
    assert code == 143, output
    done = steps_of(tmp_path)
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{done:06d}").is_dir(), output
    assert status_of(tmp_path).items() >= {"state": "interrupted", "reason": "SIGTERM"}.items()
    run.assert_gone()

    run = train(LONG)
    run.wait_for(lambda: steps_of(tmp_path) > done)
    [raylet] = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True) if child.name() == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    code, output = run.wait()
    assert code == 1, output
    assert f"{done} steps done" in output
    ended = status_of(tmp_path)
    assert ended["state"] == "failed"
    assert ended["error"].startswith(f"Ray's raylet (process raylet, pid {raylet}) died")
    assert f"error: Ray's raylet (process raylet, pid {raylet}) died" in output
    assert "Traceback" not in output
    assert (tmp_path / "runs" / "run" / "logs" / "ray-raylet.out").is_file()
    run.assert_gone()
