"""A proxy in front of an OpenAI-compatible server: what it forwards, and how it reports a backend that fails."""

import asyncio
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient

from rl_serve.backend import Backend
from rl_serve.sampling import Limits
from rl_serve.serving import create_proxy_app
from rl_serve.settings import BackendSection
from rl_train.prompts.templates import load_prompt

QUESTION = [{"role": "user", "content": "Q"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture
def proxy():
    """Starts proxies of servers on loopback; returns a client of each."""
    clients = []

    def start(port, **section):
        backend = Backend(BackendSection(host="127.0.0.1", port=port, max_retries=0, **section), concurrency=8)
        client = TestClient(create_proxy_app(backend, name="nemo-skills", limits=Limits()))
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def unused_port():
    """A port that refuses connections: bound, but not listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_the_official_client_uses_the_backend_through_the_proxy(scripted_app, serve_http, proxy):
    app, generation = scripted_app(lambda prompt: CALL if '"name": "f"' in prompt else "four")
    http = proxy(serve_http(app))
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)
    assert [model.id for model in client.models.list()] == ["nemo-skills", "scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    choice = client.chat.completions.create(model="nemo-skills", messages=QUESTION, logprobs=True, seed=1).choices[0]
    assert (choice.message.content, choice.finish_reason, len(choice.logprobs.content)) == ("four", "stop", 5)
    stream = client.chat.completions.create(model="scripted", messages=QUESTION, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == "four"
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(model="scripted", messages=QUESTION, **with_usage)
    assert last.usage.completion_tokens == 5
    choice = client.chat.completions.create(model="nemo-skills", messages=QUESTION, tools=[TOOL]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "f")
    completion = client.completions.create(model="nemo-skills", prompt="2+2=", n=2, extra_body={"return_token_ids": True})
    assert [each.text for each in completion.choices] == ["four", "four"]
    assert completion.choices[0].prompt_token_ids
    assert generation.prompts[-1] == "2+2="
    with pytest.raises(openai.BadRequestError, match="Unsupported: best_of") as refused:
        client.completions.create(model="nemo-skills", prompt="1", best_of=3)
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="There is no model 'other': this server has 'nemo-skills', 'scripted'"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.NotFoundError, match="There is no model 'a/b': this server has 'nemo-skills', 'scripted'"):
        client.models.retrieve("a/b")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/chat/completions", {"messages": QUESTION, "stream": True}),
        ("/v1/completions", {"prompt": "1", "model": "known"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/generate", {"question": "Q"}),
    ],
)
def test_a_backend_that_does_not_answer_gives_status_503_and_the_reason(proxy, unused_port, path, body):
    response = proxy(unused_port, model="known").post(path, json=body)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    error = response.json()["error"]
    assert error["code"] == "backend_unavailable"
    assert f"http://127.0.0.1:{unused_port}" in error["message"]
    assert "ConnectError" in error["message"]


def test_health_and_models_report_a_backend_that_does_not_answer(proxy, unused_port):
    client = proxy(unused_port)
    assert client.get("/v1/models").status_code == 503
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "backend unavailable")
    assert "ConnectError" in health.json()["reason"]


def failing(status, body):
    app = FastAPI()
    app.post("/v1/chat/completions")(lambda: JSONResponse(body, status_code=status))
    app.get("/v1/models")(lambda: {"data": [{"id": "m"}]})
    return app


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "body", "given", "message"),
    [
        (500, {"error": {"message": "boom"}}, 502, "The backend failed: "),
        (401, {"error": {"message": "bad sekret-key"}}, 502, "The backend refused the proxy's API key (server.api_key)"),
        (429, {"error": {"message": "slow down"}}, 429, "slow down"),
        (422, {"error": {"message": "no such field", "param": "x", "code": "c"}}, 422, "no such field"),
        (200, {"unexpected": 1}, 502, "The backend's response has no choices"),
    ],
)
def test_errors_of_the_backend_are_passed_on_or_become_status_502(serve_http, proxy, status, body, given, message, stream):
    client = proxy(serve_http(failing(status, body)), api_key="sekret-key")
    if status == 200:
        response = client.post("/generate", json={"question": "Q"})
    else:
        response = client.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
    assert response.status_code == given
    assert response.json()["error"]["message"].startswith(message)
    assert "sekret" not in response.text


ANSWERS = (
    ("/v1/chat/completions", {"messages": QUESTION}, "message", {"role": "assistant", "content": "4"}),
    ("/v1/completions", {"prompt": "1"}, "text", "4"),
    ("/inference/v1/generate", {"token_ids": [1]}, "token_ids", [4]),
)
MANGLED = {
    "a list": "[]",
    "no choices": "{}",
    "choices that are no list": '{"choices": {"a": 1}}',
    "an empty choice": '{"choices": [{}]}',
    "a choice of another form": '{"choices": [{"VALUE": 5}]}',
    "text": "four",
    "deep nesting": "[" * 100_000,
    "a lone surrogate": '{"choices": [{"GOOD, "x": "\\ud800"}]}',
    "not a number": '{"choices": [{"GOOD, "x": NaN}]}',
    "an error with a lone surrogate": '{"error": {"message": "\\ud800"}}',
}


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("mangled", MANGLED)
def test_a_response_of_another_form_than_the_endpoints_is_status_502(serve_http, proxy, mangled, status):
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "m"}]})
    for path, _, name, value in ANSWERS:
        good = f'{name}": {json.dumps(value)}'
        text = MANGLED[mangled].replace("GOOD", good).replace("VALUE", name)
        app.post(path)(lambda text=text: Response(text, status, media_type="application/json"))
    client = proxy(serve_http(app), model="m")
    requests = [(path, body) for path, body, _, _ in ANSWERS] + [("/generate", {"question": "Q"})]
    graded = ("/v1/chat/completions", {"messages": QUESTION, "expected_answer": "4"})
    for path, body in [*requests, graded]:
        found = client.post(path, json=body)
        if path == "/generate" and mangled == "not a number" and status == 200:
            assert found.json()["generation"] == "4"  # only its text is sent on
        else:
            assert found.status_code == (502 if status == 200 else 400), (path, found.text)
            assert found.json()["error"]["message"]


def test_a_response_that_is_too_large_is_not_kept(serve_http, proxy, monkeypatch):
    monkeypatch.setattr("rl_serve.backend.MAX_RESPONSE_BYTES", 2**16)

    async def large():
        for _ in range(100):
            yield b" " * 2**14

    app = failing(200, {})
    app.post("/v1/completions")(lambda: StreamingResponse(large(), media_type="application/json"))
    app.post("/inference/v1/generate")(lambda: StreamingResponse(large(), media_type="text/event-stream"))
    client = proxy(serve_http(app), model="m")
    found = client.post("/v1/completions", json={"prompt": "1"})
    assert found.status_code == 502
    assert "more than 65536 bytes" in found.json()["error"]["message"]
    streamed = client.post("/inference/v1/generate", json={"token_ids": [1], "stream": True})
    assert "more than 65536 bytes" in streamed.text


def test_a_stream_that_is_none_is_status_502(serve_http, proxy):
    app = failing(200, {})
    app.post("/v1/completions")(lambda: {"error": "not a stream"})
    found = proxy(serve_http(app), model="m").post("/v1/completions", json={"prompt": "1", "stream": True})
    assert found.status_code == 502
    assert "application/json instead of a stream" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_below_the_http_client_is_a_backend_that_does_not_answer(proxy, unused_port, monkeypatch, stream):
    async def broken(*_, **__):
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    client = proxy(unused_port, model="m")
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", broken)
    found = client.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
    assert (found.status_code, found.json()["error"]["code"]) == (503, "backend_unavailable")
    assert "getpeername" in found.json()["error"]["message"]
    assert client.get("/health").status_code == 503


def test_a_client_that_hangs_up_ends_the_stream_of_the_backend(serve_http, proxy):
    ended = asyncio.Event()
    app = failing(200, {})

    async def endless():
        try:
            while True:
                yield "data: {}\n\n"
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    app.post("/v1/completions")(lambda: StreamingResponse(endless(), media_type="text/event-stream"))
    app.get("/ended")(ended.wait)
    port = serve_http(app)
    front = serve_http(create_proxy_app(Backend(BackendSection(port=port), concurrency=1), name="p", limits=Limits()))
    with httpx.stream("POST", f"http://127.0.0.1:{front}/v1/completions", json={"stream": True}) as response:
        next(response.iter_lines())
    assert httpx.get(f"http://127.0.0.1:{port}/ended", timeout=60).status_code == 200


def test_a_client_that_hangs_up_before_the_backend_responds_ends_its_stream_too(serve_http):
    entered, ended = asyncio.Event(), asyncio.Event()
    app = failing(200, {})

    @app.post("/v1/completions")
    async def waits(request: Request):
        await request.body()
        entered.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ended.set()

    app.get("/entered")(entered.wait)
    app.get("/ended")(ended.wait)
    port = serve_http(app)
    front = serve_http(create_proxy_app(Backend(BackendSection(port=port), concurrency=1), name="p", limits=Limits()))
    with socket.create_connection(("127.0.0.1", front)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 16"
        client.sendall(f'{head}\r\n\r\n{{"stream": true}}'.encode())
        assert httpx.get(f"http://127.0.0.1:{port}/entered", timeout=60).status_code == 200
    assert httpx.get(f"http://127.0.0.1:{port}/ended", timeout=60).status_code == 200


QUICK_START = """
python -m nemo_skills.inference.generate \
    ++start_server=True \
    ++generate_port=7000 \
    ++prompt_config=generic/math \
    ++server.server_type=vllm \
    ++server.host=localhost \
    ++server.port=5000
"""
DRY_RUN = """
python -m nemo_skills.inference.generate \
    ++start_server=True \
    ++prompt_config=generic/math \
    ++dry_run=True
"""
CHAT = """
curl -X POST http://localhost:7000/v1/chat/completions \
  -H "Content-Type: application/json" \
  -d '{
    "model": "nemo-skills",
    "messages": [
      {"role": "user", "content": "Solve: What is 2 + 2?"}
    ],
    "temperature": 0.7
  }'
"""
NATIVE = """
curl -X POST http://localhost:7000/generate \
  -H "Content-Type: application/json" \
  -d '{
    "question": "What is 2 + 2?",
    "expected_answer": "4"
  }'
"""
HEALTH = "curl http://localhost:7000/health"


def as_ours(command, *ports):
    """The words of a documented command, with our command and free ports."""
    for found, port in zip(("localhost:7000", "++server.port=5000", "++generate_port=7000"), ports, strict=False):
        command = command.replace(found, found.replace("7000", str(port)).replace("5000", str(port)))
    words = shlex.split(command.replace("\\\n", " "))
    return ["serve", *words[3:]] if words[0] == "python" else words


def test_the_documented_dry_run_prints_the_settings_and_the_filled_prompt(rlcore):
    code, said = rlcore(*as_ours(DRY_RUN))
    assert code == 0
    assert "prompt_config: generic/math" in said
    assert load_prompt("generic/math").fill({"problem": "{problem}"})[0]["content"].splitlines()[0] in said
    assert "server http://localhost:5000/v1: " in said
    assert said.endswith("dry_run: nothing was started.\n")


def test_a_settings_file_is_layered_with_overrides_and_hides_the_key(rlcore, tmp_path, monkeypatch):
    monkeypatch.setenv("BACKEND_KEY", "sekret-key-123")
    (tmp_path / "proxy.yaml").write_text(
        "prompt_config: generic/math\nserver: {port: 1, api_key: '${oc.env:BACKEND_KEY}'}\ngenerate_port: 7001\n"
    )
    code, said = rlcore(
        *("serve", "--config", tmp_path / "proxy.yaml", "++server.server_type=vllm", "++server.host=127.0.0.1"),
        *("++prompt_config=generic/cot", "++generate_port=7000", "++dry_run=True"),
    )
    assert code == 0
    shown = yaml.safe_load(said.partition("\nchecks:")[0])
    assert (shown["prompt_config"], shown["generate_port"], shown["server"]["port"]) == ("generic/cot", 7000, 1)
    assert shown["server"]["api_key"] == "${oc.env:BACKEND_KEY}"
    assert "sekret" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Nothing to serve: name a model or a run, or the server to forward to"),
        (("++server.server_tpye=vllm",), "override #1 `++server.server_tpye=vllm`: server.server_tpye: server has no key"),
        (("++server.server_type=trt",), "override #1 `++server.server_type=trt`: server.server_type: "),
        (("++server.host=http://a",), "override #1 `++server.host=http://a`: server.host"),
        (("++server.server_type=openai",), "server_type openai requires base_url"),
        (("++prompt_config=generic/mth",), "Did you mean 'generic/math'?"),
        (("++evaluator=maths", "++dry_run=True"), "maths"),
        (("++max_code_rounds=2",), "require code_execution: true"),
        (("++generate_port=7001", "--port", "7002"), "--port 7002 and generate_port 7001 differ: set one of them."),
        (("++dry_run=True", "--backend", "hf"), "--backend is an option of models and runs, but none is named."),
        (("some/model", "++server.port=1"), "override `++server.port=1`: server is a setting of a proxy, but a model"),
        (("--config", "absent.yaml"), "File absent.yaml does not exist."),
    ],
)
def test_wrong_settings_end_with_exit_code_2_and_their_location(rlcore, arguments, message):
    code, said = rlcore("serve", *arguments)
    assert code == 2
    assert message in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_documented_commands_serve_and_ask_a_proxy(scripted_app, serve_http):
    """The quick start and the requests of the documentation of NeMo-Skills, with our command and free ports."""
    begun, finish = threading.Event(), threading.Event()

    def answer(prompt):
        if "slow" in prompt:
            begun.set()
            finish.wait()
        return "So \\boxed{4}."

    app, generation = scripted_app(answer, temperature=0.7)
    words = as_ours(QUICK_START, 0, serve_http(app), 0)
    server = subprocess.Popen([sys.executable, "-m", "rlcore_cli.main", *words], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        port = int(line.rpartition(":")[2].removesuffix("/v1\n"))
        assert line.startswith("serving nemo-skills from http://localhost:")

        def curl(command):
            done = subprocess.run(["curl", "-sS", *as_ours(command, port)[1:]], capture_output=True, check=True, timeout=100)
            return yaml.safe_load(done.stdout)

        assert curl(HEALTH) == {"status": "ok", "model": "nemo-skills"}
        foreign = httpx.get(f"http://localhost:{port}/v1/models", headers={"Host": "evil.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "host_not_allowed")
        native = curl(NATIVE)
        assert (native["predicted_answer"], native["is_correct"]) == ("4", True)
        chat = curl(CHAT)
        assert chat["choices"][0]["message"]["content"] == "So \\boxed{4}."
        filled = load_prompt("generic/math").fill({"problem": "Solve: What is 2 + 2?"})[0]["content"]
        assert f"user\n{filled}<|im_end|>" in generation.prompts[-1]

        # SIGTERM lets running requests finish.
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(httpx.post, f"http://localhost:{port}/generate", json={"question": "slow"}, timeout=100)
            begun.wait()
            server.send_signal(signal.SIGTERM)
            finish.set()
            assert running.result().json()["generation"] == "So \\boxed{4}."
        assert server.wait(60) == 143
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.parametrize("more", [{}, {"expected_answer": "4"}])
def test_a_proxy_accepts_null_for_n_and_stream(scripted_app, serve_http, proxy, more):
    app, _ = scripted_app(lambda prompt: "four")
    body = {"messages": QUESTION, "n": None, "stream": None, **more}
    response = proxy(serve_http(app)).post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "four"
