"""Requests that the server rejects: invalid parameters, keys, sizes, and too many at once."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from starlette.testclient import TestClient

from rl_core.errors import WorkerDiedError
from rl_serve.edge import LimitsMiddleware
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.serving import create_app

MESSAGES = [{"role": "user", "content": "1+1="}]
TOOL = {"type": "function", "function": {"name": "f"}}
REJECTED = [
    ("/v1/completions", {"prompt": ""}, "The prompt is empty: it must have at least one token."),
    ("/v1/completions", {"prompt": []}, "There is no prompt."),
    ("/v1/completions", {"prompt": [999]}, "Token id 999 is not in the vocabulary of 18 tokens."),
    ("/v1/completions", {"prompt": "1", "temperature": -0.3}, "temperature: Input should be greater than or equal to 0"),
    ("/v1/completions", {"prompt": "1", "top_k": -2}, "top_k: Input should be greater than or equal to -1"),
    ("/v1/completions", {"prompt": "1", "presence_penalty": 2.5}, "presence_penalty: Input should be less than or equal to 2"),
    ("/v1/completions", {"prompt": "1", "min_p": 1.5}, "min_p: Input should be less than or equal to 1"),
    ("/v1/completions", {"prompt": "1", "max_tokens": 999}, "The prompt has 1 tokens and max_tokens is 999, but the model's"),
    (
        "/v1/completions",
        {"prompt": "1" * 128},
        "The prompt has 128 tokens, which leave no room for an answer: the model's context has 128",
    ),
    ("/v1/completions", {"prompt": "1", "n": 129}, "1 prompts times n=129 exceed the 128 completions of a request."),
    ("/v1/completions", {"prompt": "1", "stop": ["a", ""]}, "stop must have at most 16 strings, none of them empty."),
    ("/v1/completions", {"prompt": "1", "stop": ["a" * 1001]}, "stop must have strings of at most 1000 characters."),
    ("/v1/completions", {"prompt": "1", "temperature": 1e-40}, "temperature must be 0 (greedy) or at least 1e-06"),
    ("/v1/completions", {"prompt": "1", "logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
    ("/v1/completions", {"prompt": "1", "response_format": {"type": "json_object"}}, "Unsupported: response_format."),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_object"}},
        "response_format requires the capability `structured_outputs`, which the generation backend 'hf' does not have.",
    ),
    ("/v1/completions", {"prompt": "1", "min_tokens": 4, "best_of": 3}, "Unsupported: best_of, min_tokens. Remove them."),
    ("/v1/completions", {"prompt": "1", "echo": True, "logprobs": 0, "stream": True}, "echo with logprobs cannot be streamed"),
    ("/v1/completions", {"prompt": "1", "echo": True, "max_tokens": 0, "stream": True}, "echo with max_tokens: 0 cannot be"),
    ("/v1/completions", {"prompt": "1", "max_tokens": 0}, "max_tokens must be at least 1. With `echo: true` it may be 0"),
    ("/v1/completions", {"prompt": "1", "stream_options": {}}, "stream_options requires `stream: true`."),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}, "This model does not support tools: no parser"),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tool 0 of tools is"),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name must have 1 to 64 letters",
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict needs constrained decoding",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL] * 129}, "tools has 129 functions: at most 128 are"),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
        "tool_choice requires the capability `structured_outputs`, which the generation backend 'hf' does not have.",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls must"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "1"}]}, "messages[0].role is 'robot': expected one of"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content is required."),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "1", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls is not supported in a message of the role user.",
    ),
    ("/v1/chat/completions", {"messages": []}, "messages: List should have at least 1 item"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content must be a string or a list of",
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 1},
        "max_tokens is the earlier name",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"min_tokens": 3}},
        "Unsupported: sampling_params.min_tokens.",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message requires a last"),
    ("/v1/chat/completions", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt must be true or"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids: List should have at least 1 item"),
]


@pytest.mark.parametrize(("path", "body", "message"), REJECTED)
def test_a_request_that_cannot_be_served_as_asked_gets_status_400_and_the_reason(client, path, body, message):
    response = client.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": {"text": "1"}}, "prompt"),
        ("/v1/completions", {"prompt": ["1", 2.5]}, "prompt"),
        ("/v1/completions", {"prompt": "1", "stop": [3]}, "stop"),
        ("/v1/completions", {"prompt": "1", "stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": MESSAGES, "expected_answer": [4]}, "expected_answer"),
        ("/inference/v1/generate", {"token_ids": [1, -1]}, "token_ids[1]"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 999}}, "sampling_params.max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 999}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 999}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 130}]}, "messages"),
        ("/generate", {"question": "1" * 130}, "question"),
        ("/generate", {"question": "1", "tokens_to_generate": 999}, "tokens_to_generate"),
        ("/v1/completions", {"prompt": [1] * 130}, "prompt"),
    ],
)
def test_an_error_names_the_parameter_as_the_client_sent_it(client, path, body, param):
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_request_may_ask_for_more_tokens_than_the_engine_samples_by_default(client, model):
    assert model.max_new_tokens == 16
    body = {"prompt": [4, 5], "temperature": 100, "n": 32, "seed": 1, "return_token_ids": True}
    by_default, longer = (
        max(len(choice["token_ids"]) for choice in client.post("/v1/completions", json={**body, **more}).json()["choices"])
        for more in ({}, {"max_tokens": 99})
    )
    assert by_default == 16 < longer


NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0,
           "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "bad_words": [], "length_penalty": 1.0,
           "spaces_between_special_tokens": True, "skip_special_tokens": True, "include_stop_str_in_output": False,
           "logit_bias": None}  # fmt: skip
"""What clients such as those of verl, SkyRL and vLLM send with every request, with values that change nothing."""


def test_parameters_that_change_nothing_are_accepted_and_change_nothing(client):
    request = {"max_tokens": 8, "seed": 4, "return_token_ids": True}
    for path, body in [
        ("/v1/completions", {"prompt": "1+2", **request, "user": "me", "best_of": 1, "echo": False, "suffix": None}),
        ("/v1/chat/completions", {"messages": MESSAGES, **request, "chat_template_kwargs": {}, "add_generation_prompt": True}),
        ("/inference/v1/generate", {"token_ids": [4, 5], "sampling_params": {"max_tokens": 8, "seed": 4}}),
    ]:
        sampling = body.get("sampling_params")
        more = {**body, **NEUTRAL} if sampling is None else {**body, "sampling_params": {**sampling, **NEUTRAL}}
        plain, with_neutral = client.post(path, json=body).json(), client.post(path, json=more).json()
        assert [choice["token_ids"] for choice in with_neutral["choices"]] == [
            choice["token_ids"] for choice in plain["choices"]
        ]


def test_stop_token_ids_end_a_completion_and_stay_in_it(client):
    request = {"prompt": "1+2", "temperature": 100, "max_tokens": 16, "seed": 4, "return_token_ids": True}
    [free] = client.post("/v1/completions", json=request).json()["choices"]
    stop = free["token_ids"][2]
    [ended] = client.post("/v1/completions", json={**request, "stop_token_ids": [stop]}).json()["choices"]
    assert ended["token_ids"] == free["token_ids"][: free["token_ids"].index(stop) + 1]
    assert (ended["finish_reason"], len(free["token_ids"])) == ("stop", 16)


def test_min_p_of_one_takes_the_most_likely_token_at_any_temperature(client):
    request = {"prompt": "1+2", "max_tokens": 8, "return_token_ids": True}
    greedy, hot = (
        client.post("/v1/completions", json={**request, **more}).json()["choices"][0]["token_ids"]
        for more in ({"temperature": 0}, {"temperature": 3, "min_p": 1})
    )
    assert hot == greedy


def test_top_k_of_minus_one_samples_from_all_tokens_of_an_engine_with_its_own_top_k(model, engine):
    narrow = TestClient(create_app(replace(model, top_k=1), engine, limits=Limits()))
    request = {"prompt": "1+2", "temperature": 100, "n": 64, "max_tokens": 1, "seed": 4, "return_token_ids": True}
    choices = narrow.post("/v1/completions", json={**request, "top_k": -1}).json()["choices"]
    assert len({choice["token_ids"][0] for choice in choices}) > 5


def test_penalties_that_the_engine_lacks_are_refused_by_name(serve_scripted):
    client, _ = serve_scripted(lambda prompt: "2")
    response = client.post("/v1/completions", json={"prompt": "1", "frequency_penalty": 0.5, "presence_penalty": 0})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "frequency_penalty"
    assert "'scripted' does not support frequency_penalty" in response.json()["error"]["message"]


def test_another_model_and_another_path_are_not_found(client):
    response = client.post("/v1/completions", json={"prompt": "1", "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v2").json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_json_is_rejected(client):
    response = client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_body", None)
    assert error["message"].startswith("Invalid JSON: EOF while parsing an object at line 1 column 1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1", "n": None, "stream": None, "logprobs": None, "return_token_ids": None}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": None, "stream": None, "logprobs": None}),
    ],
)
def test_a_null_parameter_means_its_default(client, path, body):
    response = client.post(path, json={**body, "temperature": 0})
    assert response.status_code == 200, response.text
    required = {name: value for name, value in body.items() if value is not None}
    assert response.json()["choices"] == client.post(path, json={**required, "temperature": 0}).json()["choices"]


def test_a_prompt_that_is_null_is_an_error_at_prompt(client):
    response = client.post("/v1/completions", json={"prompt": None})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_every_path_but_health_needs_one_of_the_keys(model, engine):
    with TestClient(create_app(model, engine, limits=Limits(), api_keys=["first", "second"])) as client:
        assert client.get("/health").status_code == 200
        for header in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}, {"Authorization": "Basic first"}):
            response = client.get("/v1/models", headers=header)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_rejected_with_and_without_a_declared_length(model, engine, declared):
    with TestClient(create_app(model, engine, limits=Limits(max_body_bytes=1000))) as client:
        body = b'{"prompt": "' + b"1" * 2000 + b'"}'
        content = body if declared else iter([body[:500], body[500:]])
        response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_requests_over_the_limit_get_the_time_after_which_to_try_again():
    async def scenario():
        entered, finish = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            entered.set()
            await finish.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        gate = LimitsMiddleware(app, limits=Limits(max_concurrent_requests=1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://test") as client:
            first = asyncio.create_task(client.post("/v1/completions"))
            await entered.wait()
            second = await client.post("/v1/completions")
            finish.set()
            return second, await first, await client.post("/v1/completions")

    second, first, third = asyncio.run(scenario())
    assert (second.status_code, second.headers["Retry-After"]) == (429, "1")
    assert (first.status_code, third.status_code) == (200, 200)


def test_a_failing_engine_gives_status_503_and_the_server_stays_up(model):
    class Failing:
        """An engine of which a worker has died."""

        def prepare_for_generation(self):
            return True

        async def generate_async(self, data, greedy=False):
            raise WorkerDiedError("rank 0 exited with code -9")
            yield

    engine = EngineThread(Failing())
    with TestClient(create_app(model, engine, limits=Limits())) as client:
        for _ in range(2):
            response = client.post("/v1/completions", json={"prompt": "1"})
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "The engine failed: rank 0 exited with code -9."
        assert client.get("/health").status_code == 200
    engine.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"temperature": 0.3},
            "temperature must be 0 (greedy) or 1, because this generation backend samples",
        ),
        ({"top_p": 0.9}, "top_p must be 1, because"),
        ({"top_k": 5}, "top_k must be unset, because"),
    ],
)
def test_an_engine_with_one_temperature_refuses_another(serve_scripted, given, message):
    client, _ = serve_scripted(lambda prompt: "1")
    response = client.post("/v1/completions", json={"prompt": "1", **given})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert client.post("/v1/completions", json={"prompt": "1", **given, "temperature": 0}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", r'{"prompt": "\ud800"}'),
        ("/v1/completions", r'{"prompt": "1", "model": "\ud800"}'),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}'),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "1", "\ud800": 1}]}'),
        ("/generate", r'{"problem": "\ud800"}'),
        ("/v1/completions", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
)
def test_invalid_unicode_and_deep_nesting_get_status_400(client, path, body):
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [None, 3, [-1], ["1+1=", [4, 5]], [True], [[4], ["a"]]])
def test_a_prompt_of_another_form_is_one_problem_of_the_parameter(client, prompt):
    error = client.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_body")
    assert error["message"].startswith("prompt: expected a string, a list of strings, a list of token ids")


@pytest.mark.parametrize("stop", [3, [3], {"a": "b"}])
def test_stop_strings_of_another_form_are_one_problem_of_the_parameter(client, stop):
    error = client.post("/v1/completions", json={"prompt": "1", "stop": stop}).json()["error"]
    assert (error["param"], error["message"]) == ("stop", "stop: expected a string or a list of strings")


def test_an_empty_conversation_names_the_messages(client):
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
