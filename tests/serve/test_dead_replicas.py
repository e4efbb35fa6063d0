"""Replicas of a served engine that exit and may not be restarted."""

import time
from pathlib import Path

import pytest
from killed_processes import kill
from starlette.testclient import TestClient

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import EngineDiedError, WorkerDiedError
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import ServedModel, started_model
from rl_serve.serving import create_app

MODEL = Path(__file__).parents[2] / "examples/addition/model"
GREEDY = {"prompt": "12+34=", "temperature": 0}


@pytest.fixture
def replicas(local_ray):
    """A client of a server with two replicas without restarts, and the engine."""
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as cluster:
        engine = HuggingFaceGeneration(str(MODEL), cluster=cluster, max_new_tokens=8, max_restarts=0)
        served = ServedModel(
            name="addition",
            backend="hf",
            generation=engine,
            tokenizer=load_tokenizer(str(MODEL)),
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=8,
            max_model_len=engine.facts["max_model_len"],
            vocab_size=engine.facts["vocab_size"],
        )
        thread = EngineThread(engine)
        try:
            with TestClient(create_app(served, thread, limits=Limits())) as client:
                yield client, engine
        finally:
            thread.close()
            engine.shutdown()


@pytest.mark.slow
def test_remaining_replicas_answer_and_health_reports_the_dead_ones(replicas):
    client, engine = replicas
    assert client.get("/health").json() == {"status": "ok", "model": "addition"}
    first, second = engine.group.pids()

    kill(first)  # an idle engine places rows on the first replica
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["reason"].startswith("1 of 2 generation replicas exited, and policy.generation.max_restarts (0)")
    failed = client.post("/v1/completions", json=GREEDY)
    assert failed.status_code == 503
    assert "exited and `policy.generation.max_restarts` (0) does not allow another restart" in failed.json()["error"]["message"]
    for _ in range(3):
        answered = client.post("/v1/completions", json=GREEDY)
        assert answered.json()["choices"][0]["text"] == "46"

    kill(second)
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "engine failed")
    assert client.post("/v1/completions", json=GREEDY).status_code == 503


def test_health_reports_an_engine_in_this_process_whose_core_has_exited(scripted_app, monkeypatch):
    app, generation = scripted_app(lambda prompt: "4")

    async def dies(data, greedy=False):
        raise WorkerDiedError("The core process of the engine exited. Check its log.")
        yield

    with TestClient(app) as client:
        assert client.get("/health").json()["status"] == "ok"
        with monkeypatch.context() as patch:
            patch.setattr(generation, "generate_async", dies)
            assert client.post("/v1/completions", json=GREEDY).status_code == 503
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "engine failed")
            assert "The core process of the engine exited" in health.json()["reason"]
        assert client.post("/v1/completions", json=GREEDY).status_code == 200  # it was restarted
        assert client.get("/health").status_code == 200


def test_health_reports_the_transformers_engine_in_this_process_if_it_may_not_be_restarted(monkeypatch):
    engine = HuggingFaceGeneration(str(MODEL), max_new_tokens=8, max_restarts=0)
    served = ServedModel(
        name="addition",
        backend="hf",
        generation=engine,
        tokenizer=load_tokenizer(str(MODEL)),
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=8,
        max_model_len=engine.facts["max_model_len"],
        vocab_size=engine.facts["vocab_size"],
    )

    def dies(*arguments, **keywords):
        raise EngineDiedError("A process that the engine depends on exited.")

    thread = EngineThread(engine)
    try:
        with TestClient(create_app(served, thread, limits=Limits())) as client:
            assert client.get("/health").status_code == 200
            monkeypatch.setattr(engine.group.worker, "poll", dies)
            assert client.post("/v1/completions", json=GREEDY).status_code == 503
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "engine failed")
    finally:
        thread.close()
        engine.shutdown()


def core_of(generation):
    """The process of vLLM's engine core, of an engine in this process."""
    [core] = generation.group.worker._engine._engine.engine_core.resources.engine_manager.processes
    return core.pid


def kill_core_while_busy(generation):
    """Kill the engine's core while the thread that waits for its exit does something else, as on a busy machine."""
    generation.group.worker._engine._loop.call_soon_threadsafe(time.sleep, 3.0)
    kill(core_of(generation))


@pytest.mark.vllm
@pytest.mark.slow
def test_health_reports_that_the_core_of_an_idle_vllm_engine_exited():
    overrides = ["async_engine=true", "precision=float32", "max_model_len=64", "max_num_seqs=4"]
    overrides = [f"policy.generation.vllm_cfg.{override}" for override in overrides]
    overrides += ["policy.generation.max_restarts=1", "policy.generation.max_new_tokens=8"]
    with started_model(str(MODEL), backend="vllm", overrides=overrides, name="addition") as served:
        thread = EngineThread(served.generation)
        with TestClient(create_app(served, thread, limits=Limits())) as client:
            assert client.get("/health").json() == {"status": "ok", "model": "addition"}

            kill_core_while_busy(served.generation)  # the next request restarts it
            assert client.get("/health").json()["status"] == "ok"
            assert served.generation.group.workers_alive() == [False]
            assert client.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"] == "46"
            assert served.generation.restarts == 1
            assert client.get("/health").json()["status"] == "ok"

            kill_core_while_busy(served.generation)
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "engine failed")
            assert health.json()["reason"].startswith(
                "1 of 1 generation replicas exited, and policy.generation.max_restarts (1)"
            )
            assert client.post("/v1/completions", json=GREEDY).status_code == 503
        thread.close()
