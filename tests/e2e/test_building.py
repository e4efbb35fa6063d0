"""A run that fails during startup leaves a status with the reason, and no process."""

import json
import shutil
import signal

import pytest
from e2e_runs import MODEL

pytestmark = pytest.mark.slow


def status_of(folder):
    return json.loads((folder / "runs" / "run" / "status.json").read_text())


@pytest.mark.full("cli/test_train_stops.py has a signal during startup, test_stopped_runs.py Ctrl-C in a run over Ray")
def test_ctrl_c_during_startup_ends_the_run_with_a_message(train, tmp_path):
    run = train()
    run.wait_for(lambda: (tmp_path / "runs" / "run" / "status.json").exists())
    run.kill(signal.SIGINT)
    code, output = run.wait()
    assert code == 130, output
    status = status_of(tmp_path)
    assert (status["state"], status["during"]) == ("interrupted", "building")
    run.assert_gone()


@pytest.mark.full(
    "train/runtime/test_status.py has such a model; core/cluster/test_ray_worker_group.py names the rank of an error"
)
def test_a_worker_that_cannot_read_its_model_fails_the_building_with_its_name_and_its_error(train_here, tmp_path, local_ray):
    incomplete = tmp_path / "model"
    shutil.copytree(MODEL, incomplete)
    weights = incomplete / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    sft = {
        "grpo": None,
        "env": None,
        "sft": {"max_num_steps": 1, "global_batch_size": 8},
        "data": {"train": {"with_response": True}},
    }
    code, output = train_here({**sft, "policy": {"model_name": str(incomplete), "generation": None}})
    assert code != 0, output
    status = status_of(tmp_path)
    assert (status["state"], status["during"]) == ("failed", "building")
    assert "rank 0" in status["error"]
    assert "'policy'" in status["error"]


@pytest.mark.full("train/runtime/test_status.py fails in the same place; backends_vllm/test_config.py has the engine's words")
@pytest.mark.vllm
def test_an_engine_that_rejects_its_arguments_fails_startup_with_its_own_message(train, tmp_path):
    # A known argument with a value that only the engine can refuse.
    generation = {"backend": "vllm", "vllm_cfg": {"max_num_seqs": 16}, "vllm_kwargs": {"block_size": -7}}
    run = train({"policy": {"generation": generation}, "cluster": {"backend": "in_process"}})
    code, output = run.wait()
    assert code != 0, output
    status = status_of(tmp_path)
    assert (status["state"], status["during"]) == ("failed", "building")
    assert "policy.generation" in status["error"]
    assert "block_size" in status["error"]
    assert "greater than 0" in status["error"]
    run.assert_gone()
