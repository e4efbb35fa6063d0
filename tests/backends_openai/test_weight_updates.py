"""Training against `rlcore serve`: every step's weights reach the server and are verified; stale ones stop the run."""

import asyncio
import json
import threading
from contextlib import ExitStack, nullcontext

import httpx
import pytest
import torch
from openai_servers import (
    ADMIN,
    KEY,
    LEARNING,
    LEARNING_STEPS,
    MODEL,
    PausableScript,
    Script,
    assert_learned,
    complete,
    engine_of,
    listening,
    prompts,
    proxy_of,
    synchronizer,
    updatable,
)
from safetensors import safe_open
from starlette.responses import JSONResponse

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.errors import ConfigError, WeightSyncError
from rl_core.http import HttpClient, HttpError
from rl_serve.weights_api import PATHS
from rl_train.launch.train import train


@pytest.fixture
def policy():
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=str(MODEL), max_total_sequence_length=32))
    yield policy
    policy.shutdown()


def connect(url, folder, **keys):
    own = {"weight_updates": "rlcore", "admin_key": ADMIN, "refit_folder": str(folder), "model": "addition", **keys}
    return engine_of(url, **own)


def shift(policy, by):
    """Change all weights of the policy, as a step does."""
    with torch.no_grad():
        for _, tensor in policy.group.worker.iter_weights():
            tensor.add_(by)


def test_weights_are_sent_verified_and_counted_and_a_stale_tensor_is_caught(tmp_path, policy, monkeypatch):
    with updatable(tmp_path) as (url, served), connect(url, tmp_path) as engine:
        sync = synchronizer(policy, engine, tmp_path)
        assert (engine.weight_version, engine.has_own_weights) == (-1, False)
        metrics = sync.sync()
        assert metrics["refit/bytes"] > 0
        assert engine.weight_version == policy.weight_version == 0
        assert engine.weight_fingerprint() == policy.weight_fingerprint()
        assert engine.facts["precision"] == "float32"
        assert not list(tmp_path.iterdir())

        # A load that forgets the embedding, which is also the tied output layer.
        worker = served.group.worker
        load = worker.load_weights
        monkeypatch.setattr(
            worker, "load_weights", lambda found: load({k: v for k, v in found.items() if k != "model.embed_tokens.weight"})
        )
        shift(policy, 1e-3)
        with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight"):
            sync.sync()
        monkeypatch.undo()
        sync.sync()
        assert engine.weight_fingerprint() == policy.weight_fingerprint()
        sync.close()


def test_a_server_whose_weights_someone_else_replaced_is_noticed(tmp_path, policy, monkeypatch):
    with updatable(tmp_path) as (url, served), connect(url, tmp_path, api="inference") as engine:
        sync = synchronizer(policy, engine, tmp_path)
        sync.sync()
        assert engine.generate(prompts([4, 5]))["weight_version"].tolist() == [0]
        monkeypatch.setattr(served.group.worker, "_weight_version", -1)  # as after a restart of the server
        with pytest.raises(WeightSyncError, match="sampled with weight version -1, but the last sync sent version 0"):
            engine.generate(prompts([4, 5]))
        sync.close()


def test_a_server_samples_again_after_it_refused_the_weights_of_another_model(tmp_path, policy):
    with updatable(tmp_path) as (url, _), connect(url, tmp_path) as engine:
        weights = dict(policy.prepare_refit_info())
        name = next(iter(weights))
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            engine.prepare_refit_info({**weights, name: ((1, 2), "float32")})
        assert engine.generate(prompts([4, 5]))["generation_lengths"].tolist()[0] > 0

        # Also if another update was prepared before, of which no tensor has arrived.
        engine.prepare_refit_info(weights)
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            engine.prepare_refit_info({**weights, name: ((1, 2), "float32")})
        assert engine.generate(prompts([4, 5]))["generation_lengths"].tolist()[0] > 0

        # An interrupted update is not ended.
        engine.prepare_refit_info(weights)
        [keys, *_] = policy.prepare_weights_for_ipc(2**16)
        engine.update_weights(policy.get_weights_ipc_handles(keys, file=str(tmp_path / "0.safetensors")))
        with pytest.raises(WeightSyncError, match=r"stays paused.*incomplete"):
            engine.prepare_refit_info({**weights, name: ((1, 2), "float32")})
        with pytest.raises(HttpError, match="paused"):
            engine.generate(prompts([4, 5]))


def pausable(tmp_path, server):
    """Serves a scripted server of vLLM; yields it and an engine that updates its weights."""
    stack = ExitStack()
    url = stack.enter_context(listening(server.app))
    own = {"weight_updates": "vllm", "refit_folder": str(tmp_path), "model": "m", "max_retries": 0}
    return stack, stack.enter_context(engine_of(url, **own))


def test_a_refused_update_fails_at_the_first_request(tmp_path, policy, monkeypatch):
    sent, attempt = [], HttpClient._attempt

    async def counted(self, method, path, *arguments, **keywords):
        sent.append(path)
        return await attempt(self, method, path, *arguments, **keywords)

    with updatable(tmp_path) as (url, _), connect(url, tmp_path) as engine:
        weights = dict(policy.prepare_refit_info())
        monkeypatch.setattr(HttpClient, "_attempt", counted)
        with pytest.raises(WeightSyncError, match=r"after 1 attempt .*status 409"):
            engine.prepare_refit_info({**weights, next(iter(weights)): ((1, 2), "float32")})
    assert sent.count("weights/prepare") == 1


def test_a_server_of_vllm_samples_again_after_it_refused_the_weights_of_another_model(tmp_path):
    server = PausableScript({"error": "WeightSyncError: the shapes differ"})
    stack, engine = pausable(tmp_path, server)
    with stack:
        with pytest.raises(WeightSyncError, match="the shapes differ"):
            engine.prepare_refit_info({"w": ((1, 2), "float32")})
        assert server.was_paused
        assert not server.is_paused


def test_a_server_of_vllm_that_was_paused_before_stays_paused_and_the_error_tells_why(tmp_path):
    server = PausableScript({"error": "WeightSyncError: the shapes differ"})
    server.is_paused = True  # as after an update that was interrupted
    stack, engine = pausable(tmp_path, server)
    with stack:
        with pytest.raises(WeightSyncError, match=r"the shapes differ.*stays paused.*incomplete"):
            engine.prepare_refit_info({"w": ((1, 2), "float32")})
        assert server.is_paused


def test_a_server_of_vllm_that_was_paused_by_an_update_without_tensors_samples_again(tmp_path):
    server = PausableScript(
        lambda method: (
            {"error": "the shapes differ"} if method == "rlcore_prepare" else {"fingerprint": "xxh3:0", "digests": {}}
        )
    )
    server.is_paused = True  # as after a trainer that was killed when it had prepared an update
    stack, engine = pausable(tmp_path, server)
    with stack:
        with pytest.raises(WeightSyncError, match="the shapes differ"):
            engine.prepare_refit_info({"w": ((1, 2), "float32")})
        assert not server.is_paused


def test_the_pause_of_a_server_is_renewed_until_it_is_resumed(tmp_path):
    """From the engine's own thread, while the policy writes its weights."""
    server, renewed = Script(complete), threading.Semaphore(0)

    async def answer(request):
        if request.url.path == "/pause/renew":
            renewed.release()
        return JSONResponse({"paused": True, "lease_s": 0.02, "dtypes": {}, "cache_is_empty": True, "weight_version": 0})

    for path in ("/pause", "/pause/renew", "/weights/prepare", "/weights/version", "/resume"):
        server.app.add_route(path, answer, methods=["POST"])
    with listening(server.app) as url, connect(url, tmp_path, model="m") as engine:
        engine.prepare_refit_info({})
        assert all(renewed.acquire(timeout=60) for _ in range(3))
        assert "_renew" in running_tasks(engine)
        engine.invalidate_kv_cache()
        assert "_renew" not in running_tasks(engine)


def running_tasks(engine):
    async def names():
        return {task.get_coro().__name__ for task in asyncio.all_tasks()}

    return engine._run(names())


def test_a_proxy_requires_the_admin_key_and_forwards_pauses_and_refusals(tmp_path, policy):
    with updatable(tmp_path) as (url, _), proxy_of(url) as proxy:
        with httpx.Client(base_url=proxy, headers={"Authorization": f"Bearer {KEY}"}) as client:
            for path in PATHS:
                assert client.post(path, json={}).status_code == 403, path
        with connect(proxy, tmp_path) as engine:
            assert engine.facts["max_model_len"] == 32
            name, *_ = weights = dict(policy.prepare_refit_info())
            with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
                engine.prepare_refit_info({**weights, name: ((1, 2), "float32")})
            engine.prepare_refit_info(weights)
            with pytest.raises(HttpError, match="The server is paused") as refused:
                engine.generate(prompts([4, 5]))
            assert refused.value.status == 503
            engine.invalidate_kv_cache()
            assert engine.generate(prompts([4, 5]))["generation_lengths"].tolist()[0] > 0


def test_an_error_tells_if_a_server_of_vllm_could_not_be_resumed(tmp_path):
    server = PausableScript({"error": "WeightSyncError: the shapes differ"}, resumes=False)
    stack, engine = pausable(tmp_path, server)
    with stack, pytest.raises(WeightSyncError, match=r"the shapes differ.*could not be resumed.*status 500"):
        engine.prepare_refit_info({"w": ((1, 2), "float32")})


def test_a_wrong_admin_key_and_another_folder_are_errors(tmp_path, policy):
    with updatable(tmp_path / "..") as (url, _):
        with (
            connect(url, tmp_path, admin_key="wrong-key-of-a-test") as engine,
            pytest.raises(ConfigError, match="admin_key") as caught,
        ):
            synchronizer(policy, engine, tmp_path).sync()
        assert "wrong-key-of-a-test" not in str(caught.value)
        with connect(url, tmp_path) as engine, pytest.raises(WeightSyncError, match="cannot be read on the server"):
            synchronizer(policy, engine, tmp_path).sync()


def run_config(url, folder, steps, api="completions", **server):
    return {
        "defaults": str(MODEL.parents[1] / "grpo_addition.yaml"),
        "grpo": {"max_num_steps": steps, "val_at_end": True, "val_at_start": True, "val_period": 0},
        "policy": {
            "generation": {
                "backend": "openai",
                "refit_folder": str(folder),
                "openai_cfg": {
                    "base_url": f"{url}/v1",
                    "api_key": "${oc.env:A_KEY}",
                    "admin_key": "${oc.env:AN_ADMIN_KEY}",
                    "model": "addition",
                    "weight_updates": "rlcore",
                    "api": api,
                    **server,
                },
            }
        },
        "cluster": {"backend": "in_process", "workers_per_node": 1},
    }


def trained(config, tmp_path, *overrides):
    """The metrics of a run by step, and everything that it wrote as text."""
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    folder = train(path, [f"logger.log_dir={tmp_path}", "logger.run_name=run", *overrides], console=False).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    texts = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return rows, b"".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("front", [nullcontext, proxy_of], ids=["directly", "through a proxy"])
def test_grpo_trains_with_a_server_and_syncs_before_every_step(tmp_path, monkeypatch, front):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
    updates = tmp_path / "updates"
    updates.mkdir()
    small = ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_val_samples=8"]
    with updatable(updates) as (url, served), front(url) as used:
        rows, written = trained(run_config(used, updates, 2, api="inference"), tmp_path, *small)
        assert served.weight_version == 2
    steps = [row for row in rows if "refit/weight_version" in row]
    assert [row["refit/weight_version"] for row in steps][:2] == [0.0, 1.0]
    assert all(row["refit/canary_error"] < 1e-3 for row in steps)
    assert not any("rollout/ending_s" in row for row in rows)  # nothing is in progress when a synchronous run refits
    assert KEY.encode() not in written
    assert ADMIN.encode() not in written
    assert b"${oc.env:AN_ADMIN_KEY}" in written


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_after_the_first_refit_a_server_gets_adapters_alone(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
    updates = tmp_path / "updates"
    updates.mkdir()
    small = ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_val_samples=8"]
    adapters = ["++policy.hf_cfg.lora.rank=8", "policy.optimizer.kwargs.lr=0.003"]
    engine = {"vllm": ["policy.generation.vllm_cfg.max_lora_rank=8", "policy.generation.vllm_cfg.max_model_len=32"]}
    with updatable(updates, backend=backend, overrides=engine.get(backend, ())) as (url, _):
        rows, _ = trained(run_config(url, updates, 4, api="inference"), tmp_path, *small, *adapters)
    steps = [row for row in rows if "refit/weight_version" in row]
    assert [row["refit/weight_version"] for row in steps][:4] == [0.0, 1.0, 2.0, 3.0]
    # The weights before the first step are those of the validation at the start, which got all of them.
    assert [row["refit/bytes"] for row in steps[1:4]] == [_adapter_bytes(rank=8)] * 3
    assert all(row["refit/canary_error"] < 1e-3 for row in steps if "refit/canary_error" in row)
    assert all(row["mismatch/mean"] < 1e-4 for row in steps if "mismatch/mean" in row)


def _adapter_bytes(rank):
    """Bytes of A, B and s of all linear layers but the head in float32; each tensor fills a multiple of 64 bytes."""
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a dict
    sizes = [4 * rank * size for name, shape in shapes.items() if name.endswith("_proj.weight") for size in shape]
    return sum(-(-size // 64) * 64 for size in sizes) + 64 * (len(sizes) // 2)


def test_a_server_of_vllm_gets_merged_weights_and_adapters_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    config = run_config("http://127.0.0.1:1", tmp_path, 1, api="completions", weight_updates="vllm", admin_key=None)
    with pytest.raises(ConfigError, match=r"only `rlcore serve` receives adapters.*Set it to merged"):
        trained(config, tmp_path, "++policy.hf_cfg.lora.rank=8", "++policy.generation.lora=adapter")


@pytest.mark.slow
@pytest.mark.ray
def test_with_older_rollouts_the_server_gets_new_weights_when_no_rollout_is_in_progress(tmp_path, monkeypatch, no_ray):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
    updates = tmp_path / "updates"
    updates.mkdir()
    config = run_config(url="URL", folder=updates, steps=4, api="inference")
    config |= {"cluster": {"backend": "ray", "workers_per_node": 1, "use_gpus": False}, "loss_fn": {"ratio_to": "sampler"}}
    config["grpo"] |= {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_val_samples": 8, "val_period": 1}
    config["rollout"] = {"max_staleness": 1}
    in_progress = []
    with updatable(updates) as (url, served):
        prepare = served.prepare_refit_info

        def counted(info):
            in_progress.append(sum(served._stream._affinity.load))
            return prepare(info)

        monkeypatch.setattr(served, "prepare_refit_info", counted)
        config["policy"]["generation"]["openai_cfg"]["base_url"] = f"{url}/v1"
        rows, _ = trained(config, tmp_path)
    steps = [row for row in rows if row["step"] > 0]
    assert in_progress
    assert set(in_progress) == {0}
    assert [row["staleness/steps_max"] for row in steps] == [0.0, 1.0, 1.0, 1.0]
    assert all(row["rollout/mixed_version_frac"] == 0.0 for row in steps)
    assert all(row["rollout/ending_s"] >= 0 for row in steps)


@pytest.mark.full("trains for some minutes; the test before it trains for two steps")
def test_the_held_out_success_of_a_model_trained_with_a_server_rises(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
    updates = tmp_path / "updates"
    updates.mkdir()
    with updatable(updates) as (url, served):
        rows, _ = trained(run_config(url, updates, LEARNING_STEPS), tmp_path, *LEARNING)
        assert served.weight_version == LEARNING_STEPS
    assert_learned(rows)
