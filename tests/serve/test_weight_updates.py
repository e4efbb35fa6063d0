"""Weight updates of the server: only with the admin key, in a pause, and from files below its folder."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from rl_core.errors import ConfigError
from rl_core.weights.manifest import manifest_of
from rl_serve.engine import EngineThread
from rl_serve.pausing import Pause
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app
from rl_serve.weights_api import ADMIN_HEADER, ADMIN_KEY, PATHS, WeightUpdates, read_update_options

MODEL = Path(__file__).parents[2] / "examples/addition/model"
ADMIN = "an-admin-key"
API = "an-api-key"
PROMPT = [4, 5, 13, 6, 7, 16]


class Clock:
    """The time of a test."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def engine():
    """A separate engine, because its weights change."""
    with started_model(str(MODEL), backend="hf", overrides=["policy.generation.max_new_tokens=8"], name="m") as model:
        thread = EngineThread(model.generation)
        yield model, thread
        thread.close()


@pytest.fixture
def client(engine, tmp_path):
    model, thread = engine
    folder = tmp_path / "updates"
    folder.mkdir()
    clock = Clock()
    updates = WeightUpdates(model.generation, thread, folder, ADMIN, Pause(clock))
    app = create_app(model, thread, limits=Limits(), api_keys=[API], updates=updates)
    headers = {"Authorization": f"Bearer {API}", ADMIN_HEADER: ADMIN}
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        client.folder, client.clock = folder, clock
        yield client


@pytest.fixture(scope="module")
def weights(engine):
    """The model's weights, by the names that the engine expects."""
    digests = engine[0].generation.weight_digests()
    return {name: tensor for name, tensor in load_file(MODEL / "model.safetensors").items() if name in digests}


def begin(client, weights):
    assert client.post("/pause", json={}).json() == {"paused": True, "lease_s": 60.0}
    manifest = {name: [list(shape), dtype] for name, (shape, dtype) in manifest_of(weights).items()}
    return client.post("/weights/prepare", json={"weights": manifest})


def send(client, weights, name="0.safetensors", refit="a", version=1):
    (client.folder / name).parent.mkdir(exist_ok=True)
    save_file(weights, client.folder / name)
    return client.post("/weights/update", json={"file": name, "refit": refit, "weight_version": version})


def health(client):
    response = client.get("/health")
    return response.status_code, response.json()["status"]


def logprobs(client):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "logprobs": 0}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    return choice["logprobs"]["token_logprobs"], choice["weight_version"]


def changed(weights, factor):
    return {name: tensor * factor for name, tensor in weights.items()}


def test_new_weights_are_loaded_counted_and_fingerprinted(client, weights):
    before, _ = logprobs(client)
    assert begin(client, weights).json() == {"dtypes": dict.fromkeys(weights, "float32")}
    names = list(weights)
    halves = [{name: weights[name] * 0.5 for name in part} for part in (names[:3], names[3:])]
    assert send(client, halves[0], "run-1/0.safetensors").json() == {"weight_version": -1}
    refused = client.post("/resume")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "incomplete_weights")
    assert send(client, halves[1], "run-1/1.safetensors").json() == {"weight_version": 1}
    first = client.post("/weights/fingerprint").json()
    assert first["digests"].keys() == weights.keys()
    assert client.post("/resume").json() == {"cache_is_empty": True}
    after, version = logprobs(client)
    assert after != before
    assert version == client.post("/weights/version").json()["weight_version"] == 1
    begin(client, weights)
    send(client, weights, refit="b", version=2)
    assert client.post("/weights/fingerprint").json()["fingerprint"] != first["fingerprint"]
    client.post("/resume")
    assert logprobs(client) == (before, 2)


def test_sampling_is_refused_in_a_pause_and_updates_outside_of_one(client, weights):
    refused = client.post("/weights/prepare", json={"weights": {}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_paused")
    client.post("/pause", json={})
    busy = client.post("/v1/completions", json={"prompt": PROMPT})
    assert (busy.status_code, busy.headers["Retry-After"], busy.json()["error"]["code"]) == (503, "1", "paused")
    assert health(client) == (503, "paused")
    client.post("/resume")
    assert health(client) == (200, "ok")
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200


def test_a_pause_waits_for_running_requests_and_gives_up_after_its_timeout():
    async def run():
        pause = Pause()
        pause.enter()
        with pytest.raises(Exception, match="1 requests still run"):
            await pause.start(timeout_s=0.001)
        assert not pause.is_active
        waiting = asyncio.ensure_future(pause.start(timeout_s=60))
        await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(Exception, match="is paused"):
            pause.enter()
        pause.leave()
        await waiting
        assert pause.is_active

    asyncio.run(run())


def test_a_server_accepts_requests_again_after_a_repeated_pause_timed_out():
    async def run():
        pause = Pause()
        pause.enter()
        first = asyncio.ensure_future(pause.start(timeout_s=0.001))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(pause.start(timeout_s=0.002))
        found = await asyncio.gather(first, second, return_exceptions=True)
        assert [error.code for error in found] == ["busy", "busy"]
        assert not pause.is_active

    asyncio.run(run())


def test_resuming_ends_a_pause_that_still_waits_for_running_requests():
    async def run():
        pause = Pause()
        pause.enter()
        waiting = asyncio.ensure_future(pause.start(timeout_s=60))
        await asyncio.sleep(0)
        pause.end()
        pause.enter()
        pause.leave()
        pause.leave()
        with pytest.raises(Exception, match="was resumed"):
            await waiting
        assert not pause.is_active

    asyncio.run(run())


def test_an_update_that_was_refused_outside_of_a_pause_does_not_count_as_incomplete_weights(tmp_path):
    with started_model(str(MODEL), backend="hf", name="m") as model:
        thread = EngineThread(model.generation)
        app = create_app(model, thread, limits=Limits(), updates=WeightUpdates(model.generation, thread, tmp_path, ADMIN))
        (tmp_path / "0.safetensors").write_bytes(b"")
        with TestClient(app, headers={ADMIN_HEADER: ADMIN}) as client:
            refused = client.post("/weights/update", json={"file": "0.safetensors", "refit": "a", "weight_version": 1})
            assert refused.json()["error"]["code"] == "not_paused"
            client.post("/pause", json={})
            assert client.post("/resume").status_code == 200
        thread.close()


@pytest.mark.parametrize("key", [None, "", "an-api-key", "an-admin-kez"])
def test_every_endpoint_requires_the_admin_key(client, key):
    headers = {} if key is None else {ADMIN_HEADER: key}
    del client.headers[ADMIN_HEADER]
    for path in PATHS:
        found = client.post(path, json={}, headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "invalid_admin_key"), path
        assert ADMIN not in found.text
    del client.headers["Authorization"]
    assert client.post("/pause", json={}, headers={ADMIN_HEADER: ADMIN}).status_code == 401


def test_without_the_option_there_are_no_such_endpoints(engine):
    model, thread = engine
    with TestClient(create_app(model, thread, limits=Limits())) as client:
        assert {client.post(path, json={}).status_code for path in PATHS} == {404}


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "a/../../secret.safetensors",
        "/etc/passwd",
        "link.safetensors",
        "to/0.safetensors",
        "0.bin",
        "missing.safetensors",
        "folder.safetensors",
        "a\0.safetensors",
        ".",
    ],
)
def test_paths_outside_of_the_folder_and_symbolic_links_are_refused(client, weights, name):
    begin(client, weights)
    outside = client.folder.parent / "outside"
    outside.mkdir()
    save_file(weights, outside / "0.safetensors")
    save_file(weights, client.folder.parent / "secret.safetensors")
    (client.folder / "link.safetensors").symlink_to(outside / "0.safetensors")
    (client.folder / "to").symlink_to(outside)
    (client.folder / "folder.safetensors").mkdir()
    (client.folder / "0.bin").write_bytes(b"")
    (client.folder / "a").mkdir()
    found = client.post("/weights/update", json={"file": name, "refit": "a", "weight_version": 1})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "file")
    client.post("/resume")


def test_weights_that_do_not_fit_and_damaged_files_are_refused(client, weights):
    wrong = begin(client, {**weights, "extra": torch.zeros(1)})
    assert wrong.status_code == 409
    assert "extra: the policy sends it, but the engine has no such weight" in wrong.json()["error"]["message"]
    assert client.post("/resume").status_code == 200
    begin(client, weights)
    assert client.post("/weights/prepare", json={"weights": {}}).status_code == 409
    (client.folder / "0.safetensors").write_bytes(b"no weights")
    body = {"file": "0.safetensors", "refit": "a", "weight_version": 1}
    damaged = client.post("/weights/update", json=body)
    assert damaged.status_code == 409
    assert "cannot read" in damaged.json()["error"]["message"]
    begin(client, weights)
    assert send(client, weights, refit="c", version=3).json() == {"weight_version": 3}
    client.post("/resume")


def parts_of(weights):
    names = list(weights)
    return [{name: weights[name] for name in part} for part in (names[:3], names[3:])]


def test_resuming_discards_a_prepared_update_of_which_no_tensor_has_arrived(client, weights):
    before = logprobs(client)
    begin(client, weights)
    assert health(client) == (503, "updating")
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 503
    assert client.post("/resume").status_code == 200
    assert health(client) == (200, "ok")
    assert logprobs(client) == before


def test_a_second_prepare_replaces_an_update_of_which_some_tensors_have_arrived(client, weights):
    first, rest = parts_of(weights)
    begin(client, weights)
    assert send(client, first, refit="e", version=5).json() == {"weight_version": -1}
    begin(client, weights)
    refused = client.post("/resume")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "incomplete_weights")
    assert send(client, first, refit="f", version=6).json() == {"weight_version": -1}
    assert send(client, rest, refit="f", version=6).json() == {"weight_version": 6}
    assert client.post("/resume").status_code == 200
    assert logprobs(client)[1] == 6


def test_a_pause_that_is_not_renewed_ends_with_the_weights_from_before(client, weights):
    before = logprobs(client)
    begin(client, weights)
    client.clock.now += 59
    assert client.post("/pause/renew").json() == {"paused": True}
    client.clock.now += 59
    assert health(client) == (503, "updating")
    client.clock.now += 2
    assert health(client) == (200, "ok")
    assert logprobs(client) == before
    for path, body in (
        ("/pause/renew", None),
        ("/weights/update", {"file": "0.safetensors", "refit": "g", "weight_version": 7}),
    ):
        (client.folder / "0.safetensors").write_bytes(b"")
        late = client.post(path, json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "not_paused"), late.text


def test_a_request_ends_a_pause_that_was_not_renewed(client):
    client.post("/pause", json={"lease_s": 5})
    client.clock.now += 6
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200


def test_an_update_that_is_not_continued_leaves_the_server_unhealthy_until_a_complete_one(client, weights):
    first, _ = parts_of(weights)
    begin(client, weights)
    send(client, first, refit="h", version=8)
    client.clock.now += 61
    assert health(client) == (503, "unhealthy")
    refused = client.post("/v1/completions", json={"prompt": PROMPT})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unhealthy")
    assert client.post("/resume").status_code == 409
    assert client.post("/pause/renew").json()["error"]["code"] == "not_paused"
    begin(client, weights)
    assert health(client) == (503, "updating")
    assert send(client, weights, refit="i", version=9).json() == {"weight_version": 9}
    assert client.post("/resume").status_code == 200
    assert (health(client), logprobs(client)[1]) == ((200, "ok"), 9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_before_they_reach_the_engine(client, weights, value):
    before = logprobs(client)
    begin(client, weights)
    first, rest = parts_of(weights)
    name = list(first)[1]
    bad = {**first, name: torch.full_like(first[name], value)}
    refused = send(client, bad, refit="j", version=10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "WeightSyncError")
    assert f"{name} has values that are NaN or infinite" in refused.json()["error"]["message"]
    assert client.post("/resume").status_code == 200
    assert logprobs(client) == before

    begin(client, weights)
    send(client, rest, refit="k", version=11)
    assert send(client, bad, refit="k", version=11).status_code == 409
    assert client.post("/resume").status_code == 409
    client.clock.now += 61
    assert health(client) == (503, "unhealthy")
    begin(client, weights)
    send(client, weights, refit="l", version=12)
    assert client.post("/resume").status_code == 200


def test_a_file_that_the_engine_refuses_as_a_whole_leaves_its_weights_as_they_were(client, weights):
    before = logprobs(client)
    begin(client, weights)
    assert send(client, {"unknown": torch.zeros(1)}, refit="m", version=13).status_code == 409
    assert client.post("/resume").status_code == 200
    assert logprobs(client) == before


def test_the_command_requires_a_folder_and_a_key_and_serves_no_run(tmp_path, monkeypatch):
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert read_update_options(str(MODEL), None) is None
    with pytest.raises(ConfigError, match=ADMIN_KEY):
        read_update_options(str(MODEL), tmp_path)
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    with pytest.raises(ConfigError, match="does not exist"):
        read_update_options(str(MODEL), tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path)
    found = read_update_options(str(MODEL), tmp_path / "link")
    assert (found.folder, found.admin_key) == (tmp_path.resolve(), ADMIN)
    assert ADMIN not in repr(found)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ConfigError, match="rlcore convert"):
        read_update_options(str(tmp_path), tmp_path)


def test_the_command_of_vllm_is_printed_with_every_flag_that_training_needs(tmp_path, monkeypatch, capsys):
    from rlcore_cli.main import main

    monkeypatch.setenv("RLCORE_SERVE_API_KEYS", API)

    def serve(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlcore", "serve", "some/model", "--print-vllm-command", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
        with pytest.raises(SystemExit) as ended:
            main()
        found = capsys.readouterr()
        return ended.value.code, found.out + found.err

    code, text = serve("--allow-weight-updates", tmp_path, "--port", 5000, "--name", "m")
    assert code == 0, text
    assert text.startswith(
        f"VLLM_SERVER_DEV_MODE=1 RLCORE_WEIGHT_UPDATES_DIR={tmp_path.resolve()} python -m vllm.entrypoints.openai.api_server "
        "--enable-scale-out --model some/model --served-model-name m --host 127.0.0.1 --port 5000 --logprobs-mode "
        "processed_logprobs --generation-config vllm --worker-extension-cls rl_backends_vllm.refit.ServerWeights"
    )
    assert serve()[0] == 2
    for arguments, reason in (
        (("--host", "0.0.0.0"), "check no key"),
        (("--backend", "vllm"), "--backend has no effect"),
        (("policy.generation.temperature=1",), "KEY=VALUE has no effect"),
    ):
        code, text = serve("--allow-weight-updates", tmp_path, *arguments)
        assert (code, reason in text) == (2, True), text
