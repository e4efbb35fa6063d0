"""Hundreds of concurrent requests while the backend is killed and restarted."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rl_serve.app import create_proxy_app
from rl_serve.backend import Backend
from rl_serve.sampling import Limits
from rl_serve.settings import BackendSection

MODEL = Path(__file__).parents[2] / "examples/addition/model"
REQUESTS = 400
REJECTIONS = {429, 502, 503}


def start_backend(port):
    """Starts a backend and waits until it serves; returns the process and its port."""
    arguments = [str(MODEL), "--backend", "hf", "--port", str(port), "policy.generation.max_new_tokens=16"]
    server = subprocess.Popen([sys.executable, "-m", "rlcore_cli.main", "serve", *arguments], stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    return server, int(line.rpartition(":")[2].removesuffix("/v1\n"))


@pytest.mark.full("starts two servers; test_proxy.py has a backend that is down and errors that it returns")
def test_each_request_gets_a_response_or_a_rejection_while_the_backend_is_killed_and_restarted(serve_http):
    server, port = start_backend(0)
    backend = Backend(BackendSection(host="127.0.0.1", port=port, max_retries=1), concurrency=64)
    front = serve_http(create_proxy_app(backend, name="proxy", limits=Limits(max_concurrent_requests=300)))
    body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}

    async def scenario():
        nonlocal server
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", limits=limits, timeout=300) as client:
            answered = asyncio.Event()

            async def ask():
                response = await client.post("/v1/chat/completions", json=body)
                if response.status_code == 200:
                    answered.set()
                return response

            first = [asyncio.ensure_future(ask()) for _ in range(REQUESTS)]
            await answered.wait()
            server.kill()
            server.wait()
            server.stdout.close()
            second = [asyncio.ensure_future(ask()) for _ in range(REQUESTS)]
            found = await asyncio.gather(*first, *second)
            server, _ = await asyncio.to_thread(start_backend, port)
            return found, await asyncio.gather(*(ask() for _ in range(50)))

    try:
        during, after = asyncio.run(scenario())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert len(during) == 2 * REQUESTS
    for response in during:
        if response.status_code == 200:
            assert response.json()["choices"][0]["message"]["content"] == "46"
        else:
            assert response.status_code in REJECTIONS, response.text
            assert response.json()["error"]["message"]
    assert {response.status_code for response in during} >= {200, 503}
    assert [response.status_code for response in after] == [200] * 50
