"""status.json: who runs, since when, how it ended; and the processes of now, after a worker was replaced."""

import datetime
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation_worker import HFGenerationWorker
from rl_core.assembly.status import Status
from rl_core.cluster import RayVirtualCluster
from rl_core.dispatch.generation import DistributedGeneration

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


def read(folder):
    return json.loads((folder / "status.json").read_text())


def test_a_run_says_when_it_began_and_at_its_end_how_long_it_took(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    status = Status(tmp_path, parts={"policy": None}, since=time.perf_counter() - 90.0)
    status.running()
    running = read(tmp_path)
    assert running.keys() == {"state", "started", "pid", "workers"}
    assert (running["state"], running["pid"], running["workers"]) == ("running", os.getpid(), {})
    started = datetime.datetime.fromisoformat(running["started"])
    # Written in whole seconds.
    assert 89 <= (before - started).total_seconds() <= 92
    status.ended("failed", during="train", error="NaN")
    failed = read(tmp_path)
    assert failed.items() >= {"state": "failed", "during": "train", "error": "NaN", "started": running["started"]}.items()
    assert 90 <= failed["seconds"] < 92
    ended = datetime.datetime.fromisoformat(failed["ended"])
    assert (ended - started).total_seconds() == pytest.approx(failed["seconds"], abs=1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_after_a_worker_was_replaced_the_processes_are_those_that_live(tmp_path):
    config = HFGenerationConfig(backend="hf", model_name=str(MODEL), num_workers=1)
    with RayVirtualCluster([1], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as cluster:
        engine = DistributedGeneration(worker_class=HFGenerationWorker, config=config, cluster=cluster)
        try:
            engine.wait_ready()
            status = Status(tmp_path, parts={"policy": None, "generation": engine}, since=time.perf_counter())
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
