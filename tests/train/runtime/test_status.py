"""status.json from the start of a run to its end, and the current processes after a restart."""

import datetime
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray import cloudpickle

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import GenerationConfig
from rl_core.errors import DataError, NonFiniteError, RLCoreError
from rl_train.errors import RunInterrupted
from rl_train.launch.train import train
from rl_train.run_folders.status import Status
from rlcore_cli.report.page import ending_of, render
from rlcore_cli.report.run_folder import read_run_folder

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


def read(folder):
    return json.loads((folder / "status.json").read_text())


def test_a_run_reports_its_start_time_and_at_the_end_its_duration(tmp_path):
    before, now = datetime.datetime.now(datetime.UTC), time.perf_counter()
    with Status(tmp_path, since=now - 90.0) as status:
        building = read(tmp_path)
        assert building.keys() == {"state", "started", "host", "pid"}
        assert (building["state"], building["pid"]) == ("building", os.getpid())
        status.set_workers({"policy": None}, phase=lambda: None, steps=7)
        status.running()
        running = read(tmp_path)
        assert (running["state"], running["pid"], running["workers"]) == ("running", os.getpid(), {})
        started = datetime.datetime.fromisoformat(running["started"])
        assert building["started"] == running["started"]
        # Written in whole seconds, and found by two clocks, between which a busy machine may pause.
        pause = time.perf_counter() - now
        assert 89 - pause <= (before - started).total_seconds() <= 92
    finished = read(tmp_path)
    pause = time.perf_counter() - now
    assert finished.items() >= {"state": "finished", "steps": 7, "started": running["started"]}.items()
    assert 90 <= finished["seconds"] < 92 + pause
    ended = datetime.datetime.fromisoformat(finished["ended"])
    assert (ended - started).total_seconds() == pytest.approx(finished["seconds"], abs=1.5 + pause)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (NonFiniteError("the loss is NaN"), {"state": "failed", "during": "train", "error": "the loss is NaN"}),
        (KeyError("lr"), {"state": "failed", "during": "train", "error": "KeyError: 'lr'"}),
        (AssertionError(), {"state": "failed", "during": "train", "error": "AssertionError: "}),
        (KeyboardInterrupt(), {"state": "interrupted", "during": "train", "error": ""}),
        (RunInterrupted(3, saved=True), {"state": "interrupted", "during": "train"}),
    ],
)
def test_the_status_of_an_ended_run_has_its_phase_and_error_message(tmp_path, error, reported):
    with suppress(BaseException), Status(tmp_path, since=time.perf_counter()) as status:
        status.set_workers({}, phase=lambda: "train", steps=7)
        raise error
    assert read(tmp_path).items() >= reported.items()
    assert "steps" not in read(tmp_path)


@pytest.fixture
def launch(tmp_path):
    """Train in this process; the run folder is `runs/run`."""

    def start(changes=None, **options):
        config = {
            "sft": {"max_num_steps": 2, "global_batch_size": 2},
            "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8, "with_response": True}},
            "cluster": {"backend": "in_process"},
            "logger": {"log_dir": str(tmp_path / "runs")},
        }
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps({**config, **(changes or {})}))
        return train(path, console=False, **options)

    return start


def reported(folder):
    """The status, and its report."""
    run = read_run_folder(folder)
    ending = ending_of(run)
    assert ending.sentence in render(run, ending, max_mib=1.0)
    return read(folder), ending


def test_missing_data_columns_are_recorded_in_the_status_of_the_run_folder(launch, tmp_path):
    rows = tmp_path / "rows.jsonl"
    good = {"question": "1+2=", "expected_answer": "3"}
    # The first row is checked before the folder is created.
    rows.write_text("\n".join(map(json.dumps, (good, {"frage": "1+2=", "expected_answer": "3"}))))
    with pytest.raises(DataError):
        launch({"data": {"train": {"dataset_name": "jsonl", "path": str(rows)}}})
    status, ending = reported(tmp_path / "runs" / "run")
    assert (status["state"], status["during"]) == ("failed", "building")
    assert "question" in status["error"]
    assert "frage" in status["error"]
    assert ending.sentence == "Failed during startup, after 0 of 2 steps."
    assert ending.error == status["error"]


def test_an_incomplete_model_folder_fails_startup_and_names_the_policy(launch, tmp_path):
    incomplete = tmp_path / "model"
    shutil.copytree(MODEL, incomplete)
    weights = incomplete / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(RLCoreError):
        launch({"policy": {"backend": "hf", "model_name": str(incomplete), "max_total_sequence_length": 16}})
    status, ending = reported(tmp_path / "runs" / "run")
    assert (status["state"], status["during"]) == ("failed", "building")
    assert f"policy.model_name: A file of {incomplete} is incomplete" in status["error"]
    assert ending.state == "failed"


def test_a_run_that_breaks_in_a_step_names_the_phase(launch, tmp_path):
    too_much = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e30}}
    policy = {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16, "optimizer": too_much}
    with pytest.raises(NonFiniteError):
        launch({"policy": policy, "sft": {"max_num_steps": 4, "global_batch_size": 2}})
    status, ending = reported(tmp_path / "runs" / "run")
    assert (status["state"], status["during"]) == ("failed", "train")
    assert ending.sentence.startswith("Failed in phase train, after ")


class IdleWorker:
    """A generation worker that does nothing."""

    def __init__(self, context, config):
        self.context = context

    def setup(self):
        return {}

    def prepare_for_generation(self):
        return True

    def shutdown(self): ...


@pytest.mark.slow
def test_after_a_worker_was_replaced_the_processes_are_those_that_live(tmp_path, local_ray):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = GenerationConfig(backend="idle", num_workers=1)
    with (
        RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as cluster,
        Status(tmp_path, since=time.perf_counter()) as status,
    ):
        engine = DistributedGeneration(worker_class=IdleWorker, config=config, cluster=cluster)
        try:
            engine.wait_ready()
            status.set_workers({"policy": None, "generation": engine}, phase=lambda: None, steps=1)
            status.running()
            [victim] = read(tmp_path)["workers"]["generation"]
            written = (tmp_path / "status.json").stat().st_mtime_ns
            status.running()
            assert (tmp_path / "status.json").stat().st_mtime_ns == written, "nothing changed, so nothing is written"
            os.kill(victim, signal.SIGKILL)
            engine.prepare_for_generation()
            assert engine.restarts == 1
            status.running()
            [successor] = read(tmp_path)["workers"]["generation"]
            assert successor != victim
            assert psutil.pid_exists(successor)
        finally:
            engine.shutdown()
