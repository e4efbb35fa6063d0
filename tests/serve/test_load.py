"""Hundreds of concurrent requests while the backend is killed and restarted, and the memory of a server over many requests."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from rl_core.rendezvous.interfaces import free_port
from rl_serve.backend import Backend
from rl_serve.sampling import Limits
from rl_serve.serving import create_proxy_app
from rl_serve.settings import BackendSection

MODEL = Path(__file__).parents[2] / "examples/addition/model"
REJECTIONS = {429, 502, 503}


def start_backend(port):
    """Starts a backend and waits until it serves; returns the process and its port."""
    arguments = [str(MODEL), "--backend", "hf", "--port", str(port), "policy.generation.max_new_tokens=16"]
    server = subprocess.Popen([sys.executable, "-m", "rlcore_cli.main", "serve", *arguments], stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    return server, int(line.rpartition(":")[2].removesuffix("/v1\n"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(150, marks=pytest.mark.full("more requests; 40 run in CI"))])
def test_each_request_gets_a_response_or_a_rejection_while_the_backend_is_killed_and_restarted(serve_http, count):
    server, port = start_backend(free_port("127.0.0.1"))  # no client takes it while the backend is restarted
    backend = Backend(BackendSection(host="127.0.0.1", port=port, max_retries=1), concurrency=64)
    front = serve_http(create_proxy_app(backend, name="proxy", limits=Limits(max_concurrent_requests=300)))
    body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}

    async def scenario():
        nonlocal server
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", limits=limits, timeout=300) as client:
            answered = asyncio.Event()

            async def ask(number=0):
                response = await client.post("/v1/chat/completions", json={**body, "stream": number % 2 == 1})
                if response.status_code == 200:
                    answered.set()
                return response

            first = [asyncio.ensure_future(ask(number)) for number in range(count)]
            await answered.wait()
            server.kill()
            server.wait()
            server.stdout.close()
            second = [asyncio.ensure_future(ask(number)) for number in range(count)]
            found = await asyncio.gather(*first, *second)
            server, _ = await asyncio.to_thread(start_backend, port)
            return found, await asyncio.gather(*(ask(number) for number in range(10)))

    try:
        during, after = asyncio.run(scenario())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert len(during) == 2 * count
    for response in during:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("[DONE]\n\n") or json.loads(response.text.splitlines()[-2][6:])["error"]["message"]
        elif response.status_code == 200:
            assert response.json()["choices"][0]["message"]["content"] == "46"
        else:
            assert response.status_code in REJECTIONS, response.text
            assert response.json()["error"]["message"]
    assert {response.status_code for response in during} >= {200, 503}
    assert [response.status_code for response in after] == [200] * 10


def requests_of_all_kinds(count):
    """Path, body and expected status of requests with batches, lengths and parameters that vary."""
    draw = random.Random(0)
    for number in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        length = draw.randrange(1, 40)
        message = {"role": "user", "content": f"{a}+{b}="}
        tokens = [draw.randrange(4, 14) for _ in range(length)]
        yield [
            ("/v1/completions", {"prompt": tokens, "n": 1 + number % 5, "max_tokens": 1 + number % 4, "stream": True}, 200),
            ("/v1/completions", {"prompt": [f"{a}+{b}=", f"{b}+{a}="], "logprobs": 0, "temperature": 0}, 200),
            ("/v1/completions", {"prompt": f"{a}+{b}=", "best_of": 3}, 400),
            ("/v1/chat/completions", {"messages": [message], "max_tokens": 4, "logprobs": True, "seed": number}, 200),
            ("/generate", {"question": f"{a}+{b}=", "expected_answer": str(a + b)}, 200),
            ("/inference/v1/generate", {"token_ids": tokens, "sampling_params": {"max_tokens": 3}}, 200),
        ][number % 6]


@pytest.mark.full("10,000 requests take several minutes")
def test_memory_after_10000_requests_is_within_5_percent_of_that_after_2000():
    # Until then, threads start, and batches have sizes that were not there before: when, depends on the machine's speed.
    server, port = start_backend(0)
    assert httpx.get(f"http://127.0.0.1:{port}/health", headers={"Host": "evil.example"}).status_code == 403
    process = psutil.Process(server.pid)
    requests = list(requests_of_all_kinds(10_000))

    async def send(client, waiting):
        for path, body, status in waiting:
            response = await client.post(path, json=body)
            assert response.status_code == status, response.text

    async def scenario():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            found = []
            for part in (requests[:2000], requests[2000:]):
                waiting = iter(part)
                await asyncio.gather(*(send(client, waiting) for _ in range(64)))
                found.append(process.memory_info().rss)
            return found

    try:
        before, after = asyncio.run(scenario())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert after <= 1.05 * before, f"{before / 2**20:.0f} MiB after 2,000 requests, {after / 2**20:.0f} MiB after 10,000"
