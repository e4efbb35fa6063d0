"""Prompt configs, rounds of code and grading, in chat completions and `/generate`, with a local model and through a proxy."""

import asyncio
import threading

import pytest
from starlette.testclient import TestClient

from rl_core.config.schema import EnvironmentConfig
from rl_serve.backend import Backend
from rl_serve.chat_service import ChatService, open_chat_service
from rl_serve.grading import Grader
from rl_serve.sampling import Limits
from rl_serve.serving import create_proxy_app
from rl_serve.settings import BackendSection, ChatSettings
from rl_train.prompts.templates import load_prompt

PROBLEM = "What is 2 + 2?"
FILLED = load_prompt("generic/math").fill({"problem": PROBLEM})[0]["content"]
CODE = "Let me compute.\n```python\nx = 2 + 2\nprint(x)\n```"


def compute_then_answer(prompt):
    """Computes in two rounds, then answers with what was printed."""
    if "output\n8" in prompt:
        return "It is \\boxed{8}."
    return "Twice that:\n```python\nx * 2\n```" if "output\n4" in prompt else CODE


@pytest.fixture(params=["local", "proxy"])
def serve(request, scripted_app, serve_http):
    """Serves a scripted model with some settings, directly or through a proxy; returns a client and the engine."""
    opened = []

    def start(answer, **settings):
        service = open_chat_service(ChatSettings.model_validate(settings))
        given = service.__enter__()
        opened.append(service)
        if request.param == "local":
            app, generation = scripted_app(answer, service=given)
        else:
            inner, generation = scripted_app(answer)
            backend = Backend(BackendSection(port=serve_http(inner), host="127.0.0.1"), concurrency=8)
            app = create_proxy_app(backend, name="scripted", limits=Limits(), service=given)
        client = TestClient(app)
        client.__enter__()
        opened.append(client)
        return client, generation

    yield start
    for each in reversed(opened):
        each.__exit__(None, None, None)


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_fills_the_problem_of_the_prompt_config_with_the_question_and_grades(serve):
    client, generation = serve(lambda prompt: "So \\boxed{4}.", prompt_config="generic/math")
    found = post(client, "/generate", question=PROBLEM, expected_answer="4")
    assert found == {
        "generation": "So \\boxed{4}.",
        "num_generated_tokens": len("So \\boxed{4}.") + 1,
        "finish_reason": "stop",
        "predicted_answer": "4",
        "is_correct": True,
    }
    assert generation.prompts == [f"<|im_start|>user\n{FILLED}<|im_end|>\n<|im_start|>assistant\n"]
    assert post(client, "/generate", question=PROBLEM, expected_answer=5)["is_correct"] is False


def test_chat_fills_the_first_user_message_and_grades_each_choice(serve):
    client, generation = serve(lambda prompt: "So \\boxed{4}.", prompt_config="generic/math")
    messages = [
        {"role": "user", "content": PROBLEM},
        {"role": "assistant", "content": "5?"},
        {"role": "user", "content": "Are you sure?"},
    ]
    found = post(client, "/v1/chat/completions", messages=messages, expected_answer="4", n=2)
    assert [choice["is_correct"] for choice in found["choices"]] == [True, True]
    assert found["choices"][1]["message"]["content"] == "So \\boxed{4}."
    assert f"user\n{FILLED}<" in generation.prompts[0]
    assert "user\nAre you sure?<" in generation.prompts[0]


def test_token_endpoints_and_text_completions_apply_nothing(serve):
    client, generation = serve(lambda prompt: "4", prompt_config="generic/math")
    post(client, "/v1/completions", prompt="2+2=")
    post(client, "/inference/v1/generate", token_ids=[17, 18])
    assert generation.prompts[0] == "2+2="
    assert len(generation.prompts[1]) == 2


def test_the_system_message_of_the_prompt_config_yields_to_that_of_the_request(serve):
    client, generation = serve(lambda prompt: "4", prompt_config="generic/cot")
    post(client, "/v1/chat/completions", messages=[{"role": "user", "content": "Q"}])
    post(client, "/v1/chat/completions", messages=[{"role": "system", "content": "Mine"}, {"role": "user", "content": "Q"}])
    assert generation.prompts[0].startswith("<|im_start|>system\nYou are a careful assistant")
    assert generation.prompts[1].startswith("<|im_start|>system\nMine<|im_end|>\n<|im_start|>user\nQ\n")


def test_the_model_continues_a_final_message_of_the_assistant_and_the_whole_answer_is_graded(serve):
    client, generation = serve(lambda prompt: "{4}." if prompt.endswith("So \\boxed") else "?")
    messages = [{"role": "user", "content": PROBLEM}, {"role": "assistant", "content": "So \\boxed"}]
    request = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    [choice] = post(client, "/v1/chat/completions", expected_answer="4", **request)["choices"]
    assert generation.prompts == [f"<|im_start|>user\n{PROBLEM}<|im_end|>\n<|im_start|>assistant\nSo \\boxed"]
    assert (choice["message"]["content"], choice["predicted_answer"], choice["is_correct"]) == ("{4}.", "4", True)
    [plain] = post(client, "/v1/chat/completions", messages=messages)["choices"]
    assert plain["message"]["content"] == "?"


def test_code_runs_in_one_session_until_the_model_answers(serve, needs_sandbox):
    client, _ = serve(compute_then_answer, code_execution=True)
    found = post(client, "/generate", question=PROBLEM, expected_answer="8")
    assert found["code_rounds"] == 2
    assert found["generation"].split("\n\n") == [
        CODE,
        "```output\n4\n```",
        "Twice that:\n```python\nx * 2\n```",
        "```output\n8\n```",
        "It is \\boxed{8}.",
    ]
    sampled = [CODE, "Twice that:\n```python\nx * 2\n```", "It is \\boxed{8}."]
    assert found["num_generated_tokens"] == sum(len(text) + 1 for text in sampled)
    assert (found["predicted_answer"], found["is_correct"]) == ("8", True)
    chat = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": PROBLEM}])
    assert chat["choices"][0]["message"]["content"] == found["generation"]
    assert chat["choices"][0]["code_rounds"] == 2


def test_code_streams_its_messages_and_outputs(serve, needs_sandbox):
    client, _ = serve(compute_then_answer, code_execution=True)
    asked = {"messages": [{"role": "user", "content": PROBLEM}], "stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in client.post("/v1/chat/completions", json=asked).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 5 + 1 + 1 + 1
    assert '"finish_reason": "stop"' in lines[5]


def test_a_stream_whose_prompt_is_too_long_has_the_status_of_the_error(serve, needs_sandbox):
    client, _ = serve(compute_then_answer, code_execution=True)
    asked = {"messages": [{"role": "user", "content": "1" * 30_000}], "stream": True}
    refused = client.post("/v1/chat/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_number_of_rounds_is_bounded_and_failing_code_is_output(serve, needs_sandbox):
    client, _ = serve(lambda prompt: "```python\n1 / 0\n```", code_execution=True, max_code_rounds=2)
    found = post(client, "/generate", question="Q")
    assert found["code_rounds"] == 2
    assert found["generation"].count("ZeroDivisionError") == 2
    assert found["generation"].endswith("```python\n1 / 0\n```")


@pytest.mark.parametrize(
    ("settings", "path", "body", "message"),
    [
        ({}, "/generate", {}, "`question` is required."),
        ({"prompt_config": "generic/math"}, "/generate", {"text": "Q"}, "The prompt config generic/math needs problem, but"),
        ({"prompt_config": "generic/math"}, "/generate", {"question": ["Q"]}, "question: Input should be a valid string"),
        ({"prompt_config": "generic/math"}, "/generate", {"problem": ["Q"]}, "`problem` must be a string or a number"),
        ({}, "/generate", {"question": "Q", "max_tokens": 1, "tokens_to_generate": 1}, "tokens_to_generate is another name"),
        (
            {"prompt_config": "generic/math"},
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "Q"}]},
            "messages has no user message",
        ),
        (
            {},
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Q"}], "expected_answer": "1", "stream": True},
            "expected_answer requires a response without `stream`.",
        ),
        (
            {"evaluator": "weather"},
            "/generate",
            {"question": "Q", "expected_answer": "1", "model": "other"},
            "There is no model 'other'",
        ),
    ],
)
def test_a_request_that_cannot_be_answered_as_asked_gets_the_reason(serve, settings, path, body, message):
    client, _ = serve(lambda prompt: "4", **settings)
    response = client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"].startswith(message)


def test_fields_about_single_messages_are_refused_with_code(serve, needs_sandbox):
    client, _ = serve(lambda prompt: "4", code_execution=True)
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Q"}], "logprobs": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


def test_the_event_loop_continues_while_the_first_graded_requests_create_one_environment(monkeypatch):
    started, go_on, created = threading.Event(), threading.Event(), []

    class SlowGrader(Grader):
        def __init__(self, name, section=None):
            created.append(name)
            started.set()
            assert go_on.wait(60), "the event loop waited for the environment"
            super().__init__(name)

    monkeypatch.setattr("rl_serve.chat_service.Grader", SlowGrader)
    service = ChatService()
    messages = [{"role": "user", "content": "2+2"}]

    async def grade_two():
        gradings = [asyncio.create_task(service.grade(messages, r"\boxed{4}", {"expected_answer": "4"})) for _ in range(2)]
        await asyncio.to_thread(started.wait, 20)
        go_on.set()
        return await asyncio.gather(*gradings)

    assert [found["is_correct"] for found in asyncio.run(grade_two())] == [True, True]
    assert created == ["math"]
    service.close()


def test_a_run_with_several_tasks_is_graded_by_the_one_that_the_record_names(serve_scripted):
    plain, chat = (EnvironmentConfig(name="arithmetic"), EnvironmentConfig(name="math"))
    service = ChatService()
    service.use_tasks({"sums": plain, "boxes": chat})
    client, _ = serve_scripted(lambda prompt: "4", service=service)
    asked = {"question": "2+2=", "expected_answer": "4"}
    unnamed = client.post("/generate", json=asked)
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "task_name")
    graded = [post(client, "/generate", **asked, task_name=task)["is_correct"] for task in ("sums", "boxes")]
    assert graded == [True, False]
    service.close()


def test_an_environment_that_needs_other_fields_is_an_error_without_the_words_of_datasets(serve_scripted):
    service = ChatService(evaluator="instruction_following")
    client, _ = serve_scripted(lambda prompt: "4", service=service)
    refused = client.post("/generate", json={"question": "2+2=", "expected_answer": "4"})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("The answer cannot be graded: the environment 'instruction_following' needs other fields")
    assert "env_keys" not in message
    service.close()
