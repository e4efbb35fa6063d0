"""Runs on a full disk, or with infinite weights, end with one message and keep the last checkpoint."""

import json
import subprocess

import pytest
from e2e_runs import merged

IN_PROCESS = {"cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 3}, "checkpointing": {"save_period": 1}}


@pytest.fixture
def small_disk(make_small_disk):
    """A file system with space for one and a half checkpoints of the model."""
    return make_small_disk("22m")


def test_a_run_on_a_full_disk_says_so_and_continues_when_there_is_space(train_here, small_disk, tmp_path):
    on_disk = merged(IN_PROCESS, {"logger": {"log_dir": str(small_disk)}, "checkpointing": {"keep_latest_k": 1}})
    code, output = train_here(on_disk)
    run = small_disk / "run"
    assert code == 1, output
    assert "warning: " in output
    assert "1 more" in output or "2 more" in output
    assert f"error: The checkpoint of step 2 could not be written to {run / 'checkpoints'}: the disk is full" in output
    assert f"The last complete checkpoint is {run / 'checkpoints' / 'step_000001'}" in output
    assert "Traceback" not in output
    assert "Logging error" not in output
    assert [entry.name for entry in (run / "checkpoints").glob("step_*")] == ["step_000001"]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    code, output = train_here(on_disk)
    assert code == 0, output
    assert "step_000001: 1 steps done" in output


def test_a_disk_that_holds_no_checkpoint_is_refused_before_the_first_step(train_here, small_disk):
    (small_disk / "other").write_bytes(bytes(12 * 2**20))
    code, output = train_here(merged(IN_PROCESS, {"checkpointing": {"checkpoint_dir": str(small_disk / "c")}}))
    assert code == 2, output
    assert "so none can be written. Training was not started" in output
    assert "Traceback" not in output


def test_a_run_whose_weights_become_infinite_stops_before_it_saves_them(train_here, tmp_path):
    policy = {"optimizer": {"kwargs": {"lr": 3.0e38}}, "train_global_batch_size": 16}
    code, output = train_here(merged(IN_PROCESS, {"policy": policy}))
    assert code == 1, output
    assert "After step 1 the tensor model.embed_tokens.weight (rank 0) of `policy` has NaN or infinite values" in output
    assert "start again with a lower learning rate (`policy.optimizer.kwargs.lr`)" in output
    assert "Traceback" not in output
    assert not list((tmp_path / "runs" / "run").glob("checkpoints/step_*"))
    assert json.loads((tmp_path / "runs" / "run" / "status.json").read_text())["state"] == "failed"
