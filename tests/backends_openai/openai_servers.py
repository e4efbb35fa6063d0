"""Servers on the loopback interface, and engines that are connected to them."""

import inspect
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rl_backends_openai.config import OpenAIConfig
from rl_backends_openai.generation import OpenAIGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_serve.backend import Backend
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app, create_proxy_app
from rl_serve.settings import BackendSection
from rl_serve.weights_api import WeightUpdates
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import DiskTransport

MODEL = Path(__file__).parents[2] / "examples/addition/model"
KEY = "sk-a-very-secret-key"
ADMIN = "an-admin-key-of-a-test"


@contextmanager
def listening(app):
    """Serves an ASGI application in a thread; yields the URL without the version."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        listener.listen()
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def updatable(folder, *, model=MODEL, name="addition", api_keys=(KEY,), max_new_tokens=8, backend="hf", overrides=()):
    """URL and engine of `rlcore serve` in this process, which accepts weight updates from a folder."""
    overrides = [f"policy.generation.max_new_tokens={max_new_tokens}", *overrides]
    with started_model(str(model), backend=backend, overrides=overrides, name=name) as served:
        engine = EngineThread(served.generation)
        updates = WeightUpdates(served.generation, engine, folder.resolve(), ADMIN)
        app = create_app(served, engine, limits=Limits(), api_keys=list(api_keys), updates=updates)
        try:
            with listening(app) as url:
                yield url, served.generation
        finally:
            engine.close()


@contextmanager
def proxy_of(url):
    """URL of a proxy of a server, which forwards weight updates."""
    section = BackendSection(host="127.0.0.1", port=urlsplit(url).port, api_key=KEY)
    backend = Backend(section, concurrency=64, admin_key=ADMIN)
    app = create_proxy_app(backend, name="addition", limits=Limits(), api_keys=[KEY], admin_key=ADMIN)
    with listening(app) as proxy:
        yield proxy


class Script:
    """A server whose completions are answered by a function.

    Attributes:
        requests: path and body of each sampling request.
    """

    def __init__(self, answer, models=({"id": "m", "max_model_len": 64},)):
        self._answer, self._models, self.requests = answer, models, []
        endpoints = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._list),
                *(Route(path, self._complete, methods=["POST"]) for path in endpoints),
            ]
        )

    async def _list(self, request):
        return JSONResponse({"data": list(self._models)}) if self._models is not None else JSONResponse({}, 404)

    async def _complete(self, request):
        body = await request.json()
        self.requests.append((request.url.path, body))
        found = self._answer(body)
        if inspect.isawaitable(found):
            found = await found
        return found if isinstance(found, JSONResponse) else JSONResponse({"choices": [found]})


class PausableScript(Script):
    """A server with vLLM's routes for weight updates, whose workers all answer with an object or a function of the method.

    Attributes:
        is_paused: whether requests wait.
        was_paused: whether it was ever asked to pause.
    """

    def __init__(self, answer, *, resumes=True):
        super().__init__(complete)
        self._rpc, self._resumes = answer, resumes
        self.is_paused = self.was_paused = False
        for path, handler in (("/pause", self._pause), ("/resume", self._resume), ("/collective_rpc", self._call)):
            self.app.add_route(path, handler, methods=["POST"])
        self.app.add_route("/is_paused", self._state)

    async def _state(self, request):
        return JSONResponse({"is_paused": self.is_paused})

    async def _pause(self, request):
        self.is_paused = self.was_paused = True
        return JSONResponse({"status": "paused"})

    async def _resume(self, request):
        if not self._resumes:
            return JSONResponse({"error": "Failed to resume generation"}, 500)
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    async def _call(self, request):
        answer = self._rpc((await request.json())["method"]) if callable(self._rpc) else self._rpc
        return JSONResponse({"results": [json.dumps(answer)]})


def complete(body):
    """A choice of `/v1/completions` with token ids and log-probabilities."""
    return {
        "text": "4",
        "token_ids": [4, 1],
        "logprobs": {"token_logprobs": [0.0, 0.0]},
        "finish_reason": "stop",
    }


LEARNING_STEPS = 30
LEARNING = ("grpo.num_prompts_per_step=16", "grpo.max_val_samples=256")
"""Overrides of grpo_addition.yaml for a run of some minutes."""


def assert_learned(rows):
    """The metrics of a run of `LEARNING_STEPS`: every step's weights reached the server, and held-out success rose."""
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    print("held-out accuracy before and after:", accuracy)
    synced = [row for row in rows if "refit/weight_version" in row]
    assert {row["refit/weight_version"] for row in synced} >= set(range(LEARNING_STEPS))
    assert all(row["refit/canary_error"] < 1e-3 for row in synced)
    # From 0.6, a difference of 0.1 is three standard errors of 256 paired questions or more.
    assert accuracy[-1] > accuracy[0] + 0.1


SECTION = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_strings", "stop_token_ids", "refit_folder", "num_workers")


def section(url, **keys):
    """`policy.generation` with a fast back-off of at most one retry."""
    own = {key: value for key, value in keys.items() if key not in SECTION}
    return OpenAIConfig(
        model_name=str(MODEL),
        openai_cfg={"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "max_model_len": 32, **own},
        **{"max_new_tokens": 8, **{key: value for key, value in keys.items() if key in SECTION}},
    )


def synchronizer(policy, engine, folder):
    """Sends the policy's weights to the server through a folder."""
    return WeightSynchronizer(policy, engine, WeightSender(policy, DiskTransport, buffer_bytes=2**21, folder=folder))


@contextmanager
def engine_of(url, **keys):
    """A connected engine."""
    engine = OpenAIGeneration(section(url, **keys))
    try:
        yield engine
    finally:
        engine.shutdown()


def prompts(*rows, **columns):
    """A batch of prompts; row n has the seed n."""
    ids = [torch.tensor(row) for row in rows]
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in ids]),
            "sample_seeds": torch.arange(len(rows)),
            **columns,
        }
    )
