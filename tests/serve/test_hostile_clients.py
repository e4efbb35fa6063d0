"""Clients that are slow, send what no client library sends, or are pages of the web: they get errors and hold nothing."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast
from uvicorn.server import ServerState

from rl_serve import edge
from rl_serve.agent_endpoint import AgentEndpoint
from rl_serve.backend import Backend
from rl_serve.edge import TimedHttp, read_body
from rl_serve.engine import EngineThread
from rl_serve.pausing import SharedCheck
from rl_serve.responses import EventStream, server_sent_event
from rl_serve.sampling import Limits
from rl_serve.serving import create_app, create_proxy_app
from rl_serve.settings import BackendSection
from rl_train.agents.model_server import ServerSettings

COMPLETION = {"prompt": "12+34=", "temperature": 0}


def connected(port):
    return closing(socket.create_connection(("127.0.0.1", port), timeout=60))


def request(body, *, path="/v1/completions", **headers):
    """The bytes of a POST request."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    given = {"Content-Length": len(content), **headers}
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in given.items()), "", ""]).encode() + content


def read_to_end(connection):
    """Everything that the server sends before it closes the connection."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


class Timers:
    """An event loop whose timers end when the test says so."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self.pending = []

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_later(self, seconds, function):
        entry = (seconds, function)
        self.pending.append(entry)
        return Mock(cancel=lambda: self.pending.remove(entry))

    def end_first(self):
        self.pending.pop(0)[1]()


def test_a_connection_whose_headers_do_not_arrive_is_closed():
    async def scenario():
        app, answered = FastAPI(), asyncio.Event()
        app.get("/")(lambda: "found")
        timers = Timers()

        def connect():
            transport = Mock(spec=asyncio.Transport)
            transport.get_extra_info.return_value = None
            transport.is_closing.return_value = False
            transport.write.side_effect = lambda data: answered.set() if b"found" in data else None
            config = uvicorn.Config(app, http=TimedHttp, timeout_keep_alive=65, lifespan="off")
            protocol = TimedHttp(config, ServerState(), {}, timers)
            protocol.connection_made(transport)
            return protocol, transport

        def limits():
            return [seconds for seconds, _ in timers.pending]

        _, silent = connect()
        assert limits() == [30]
        timers.end_first()
        silent.close.assert_called_once()

        protocol, transport = connect()
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: ")
        protocol.data_received(b"local")
        assert limits() == [30]
        protocol.data_received(b"host\r\n\r\n")
        assert limits() == []  # only the time of headers is limited, not that of the response
        await answered.wait()
        await asyncio.gather(*protocol.tasks)
        assert limits() == [65]
        protocol.data_received(b"GET ")
        assert limits() == [30]
        transport.close.assert_not_called()
        timers.end_first()
        transport.close.assert_called_once()
        protocol.connection_lost(None)

    asyncio.run(scenario())


def test_a_body_that_does_not_arrive_gets_status_408_and_frees_its_place():
    async def app(scope, receive, send):
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def scenario():
        limited = edge.LimitsMiddleware(app, limits=Limits(max_concurrent_requests=1, body_timeout_s=0.01))
        sent = []

        async def keep(message):
            sent.append(message)

        parts = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            return parts.pop() if parts else await asyncio.Event().wait()

        await limited(
            {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}, receive, keep
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=limited), base_url="http://test") as client:
            return sent, await client.post("/v1/completions")

    [start, body], after = asyncio.run(scenario())
    assert (start["status"], dict(start["headers"])[b"connection"]) == (408, b"close")
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"
    assert after.status_code == 200


def test_a_client_that_does_not_read_its_response_is_left(serve_http):
    ended = threading.Event()

    async def endless():
        try:
            while True:
                yield b"x" * 65536
        finally:
            ended.set()

    app = FastAPI()
    app.post("/v1/completions")(lambda: EventStream(endless()))
    app.add_middleware(edge.LimitsMiddleware, limits=Limits(read_timeout_s=0.2))
    with connected(serve_http(app)) as connection:
        connection.sendall(request({}))
        assert ended.wait(60)


def test_headers_are_limited_whether_they_arrive_together_or_not(client, serve_http):
    assert client.get("/health", headers={"X-Long": "a" * 15_000}).status_code == 200
    for path, headers in (("/health", {"X-Long": "a" * 17_000}), (f"/health?{'a' * 17_000}", {})):
        refused = client.get(path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
    with connected(serve_http(FastAPI())) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 17_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_without_a_key_no_body_is_awaited(model, engine, serve_http, monkeypatch):
    monkeypatch.setattr(edge, "_READ_S", 0.1)
    port = serve_http(create_app(model, engine, limits=Limits(), api_keys=["secret"]))
    with connected(port) as connection:
        connection.sendall(request({}, **{"Content-Length": 1000}))
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"secret" not in answer


def test_pipelined_requests_are_answered_in_order(model, engine, serve_http):
    port = serve_http(create_app(model, engine, limits=Limits()))
    prompts = ["12+34=", "20+21=", "70+10="]
    *first, last = [request({**COMPLETION, "prompt": prompt}) for prompt in prompts]
    with connected(port) as connection:
        connection.sendall(b"".join(first) + last.replace(b"Host:", b"Connection: close\r\nHost:"))
        answers = read_to_end(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for answer in answers] == ["46", "41", "80"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_bodies_without_the_type_of_json_get_status_400_so_that_pages_of_the_web_cannot_send_them(client, path, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = client.post(path, content=json.dumps(COMPLETION), headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate"])
def test_json_other_than_an_object_is_refused_for_what_it_is(client, path):
    response = client.post(path, json=[COMPLETION])
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "the body must be a JSON object" in message
    assert "Content-Type" not in message


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7000", 200),
        ("127.0.0.1", 200),
        ("[::1]:7000", 200),
        ("a.localhost", 200),
        ("evil.example", 403),
        ("localhost.evil.example:7000", 403),
        ("10.0.0.1:7000", 403),
    ],
)
def test_without_keys_only_requests_to_this_machine_by_name_are_answered(model, engine, host, status):
    with TestClient(create_app(model, engine, limits=Limits(), is_local=True)) as client:
        for path in ("/health", "/v1/models"):
            response = client.get(path, headers={"Host": host})
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_get_status_400_also_from_a_proxy(client, value):
    backend = Backend(BackendSection(host="127.0.0.1", port=1, model="m"), concurrency=1)
    with TestClient(create_proxy_app(backend, name="proxy", limits=Limits())) as proxy:
        for each in (client, proxy):
            body = f'{{"prompt": "1", "min_p": {value}}}'
            response = each.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert "NaN or Infinity" in response.json()["error"]["message"]


def test_prompts_that_are_too_long_or_too_many_are_refused_before_they_are_tokenized(client, monkeypatch):
    monkeypatch.setattr("rl_serve.local_routes.encode", None)
    monkeypatch.setattr("rl_serve.chat_format.conversation_tokens", None)
    long = "1" * 100_000
    for path, body, message in (
        (
            "/v1/completions",
            {"prompt": long},
            "The prompt has 100000 characters, but the model's context has 128 tokens, which",
        ),
        ("/v1/completions", {"prompt": [[1], long]}, "prompt: expected a string,"),
        ("/v1/completions", {"prompt": ["1", long]}, "The prompt has 100000 characters"),
        ("/v1/completions", {"prompt": ["1"] * 1000}, "1000 prompts times n=1 exceed the 128 completions of a request."),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}] * 9000}, "The prompt has 9000 characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}] * 60_000}, "messages: List should have at"),
        ("/v1/chat/completions", {"messages": [], "metadata": [[]] * 200_000}, "The body has more than 100000 arrays"),
        ("/v1/completions", {"prompt": "[" * 200_000}, "The prompt has 200000 characters"),
        ("/inference/v1/generate", {"token_ids": ["1"] * 200_000}, "token_ids[0]: Input should be a valid integer"),
        ("/generate", {"question": long}, "The prompt has 100000 characters"),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)


@contextmanager
def while_request_waits(client, path, body, started, answered):
    """Run the block once a request has set `started`; the request succeeds after `answered`."""
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(client.post, path, json=body)
        assert started.wait(60)
        try:
            yield
        finally:
            answered.set()
        assert slow.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["wait", "wait too"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "wait"}]}),
        ("/generate", {"question": "wait"}),
    ],
)
def test_other_clients_are_answered_while_prompts_are_tokenized(serve_scripted, monkeypatch, path, body):
    tokenize = PreTrainedTokenizerFast.__call__
    started, answered, waits = threading.Event(), threading.Event(), []

    def wait(tokenizer, text, **options):
        if "wait" in text:
            started.set()
            waits.append(answered.wait(120))
        return tokenize(tokenizer, text, **options)

    client, _ = serve_scripted(lambda prompt: "yes")
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", wait)
    with while_request_waits(client, path, body, started, answered):
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "quick"}).status_code == 200
    assert all(waits)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Go.", "logprobs": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go."}], "logprobs": True}),
    ],
)
def test_other_clients_are_answered_while_completions_are_decoded(serve_scripted, monkeypatch, path, body):
    decode = PreTrainedTokenizerFast.decode
    started, answered, waits = threading.Event(), threading.Event(), []

    def wait(tokenizer, tokens, **options):
        text = decode(tokenizer, tokens, **options)
        if text.startswith("yes"):
            started.set()
            waits.append(answered.wait(120))
        return text

    client, _ = serve_scripted(lambda prompt: "yes")
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", wait)
    with while_request_waits(client, path, body, started, answered):
        assert client.get("/health").status_code == 200
    assert all(waits)


def test_health_is_reported_while_all_threads_of_the_event_loop_are_busy(serve_scripted):
    client, _ = serve_scripted(lambda prompt: "yes")
    answered, waits = threading.Event(), []

    async def occupy():
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, lambda: waits.append(answered.wait(120)))

    client.portal.call(occupy)
    assert client.get("/health").status_code == 200
    answered.set()
    assert all(waits)


def test_a_model_that_does_not_exist_is_refused_before_prompts_are_tokenized(client, monkeypatch):
    def refuse(*_):
        raise AssertionError("tokenized")

    monkeypatch.setattr("rl_serve.local_routes.encode", refuse)
    assert client.post("/v1/completions", json={"prompt": "1+1=", "model": "other"}).status_code == 404


def test_a_length_with_thousands_of_digits_is_too_large(client):
    response = client.post("/v1/completions", json=COMPLETION, headers={"Content-Length": "1" * 5000})
    assert response.status_code == 413


def test_messages_of_errors_do_not_repeat_long_requests(client):
    message = client.post("/v1/completions", json={**COMPLETION, "model": "m" * 100_000}).json()["error"]["message"]
    assert message.startswith("There is no model 'mmm")
    assert len(message) < 3000


def test_an_unexpected_error_has_the_form_of_other_errors(model):
    class Failing:
        def prepare_for_generation(self):
            return True

        async def generate_async(self, data, greedy=False):
            raise ZeroDivisionError("sekret")
            yield

    engine = EngineThread(Failing())
    with TestClient(create_app(model, engine, limits=Limits()), raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json=COMPLETION)
    engine.close()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The server failed. Its log has the details."


def test_health_requests_share_a_check():
    async def scenario():
        calls, finish = [], asyncio.Event()

        async def check():
            calls.append(1)
            await finish.wait()
            return len(calls)

        shared = SharedCheck(check)
        both = [asyncio.create_task(shared.result()) for _ in range(2)]
        await asyncio.sleep(0)
        both[0].cancel()  # a client that leaves does not end the check of the others
        finish.set()
        return await both[1], await shared.result()

    assert asyncio.run(scenario()) == (1, 2)


LINES = "a\u2028b\u2029c\x85d"


def test_events_are_one_line_for_every_client_and_a_proxy_does_not_split_those_of_its_backend(serve_http):
    event = server_sent_event({"text": LINES})
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": LINES}

    sent = [f'data: {{"text": "{LINES}"}}\n', "\nda", "ta: [DONE]\n\n", "end"]

    async def events():
        for part in sent:
            yield part.encode()

    app = FastAPI()
    app.post("/v1/completions")(lambda: StreamingResponse(events()))
    backend = Backend(BackendSection(host="127.0.0.1", port=serve_http(app), model="m"), concurrency=1)
    with TestClient(create_proxy_app(backend, name="proxy", limits=Limits())) as proxy:
        found = proxy.post("/v1/completions", json={"stream": True})
    assert found.content.decode() == "".join(sent) + "\n"


def test_the_endpoint_of_agents_checks_the_key_before_the_body(model):
    endpoint = AgentEndpoint(ServerSettings(tokenizer=model.tokenizer, model="m", temperature=1.0))
    try:
        for headers in ({}, {"Authorization": "Bearer guess"}):
            response = httpx.post(f"{endpoint.base_url}/chat/completions", content=b"{", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    finally:
        endpoint.shutdown()


def test_other_requests_are_answered_while_a_large_body_is_read(model, engine, serve_http, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        reading.set()
        assert go_on.wait(60), "the event loop waited for the body"
        return read_body(*arguments)

    monkeypatch.setattr("rl_serve.edge.read_body", slow)
    url = f"http://127.0.0.1:{serve_http(create_app(model, engine, limits=Limits()))}"
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": [1] * 100_000}, timeout=60)
        assert reading.wait(60)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        go_on.set()
        assert large.result().status_code == 400
