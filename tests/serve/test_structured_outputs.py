"""JSON mode, required tool calls and log-probabilities of alternatives, with the vLLM engine and a tiny random model."""

import json
import math

import jsonschema
import openai
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rl_serve.chat_service import open_chat_service
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app
from rl_serve.settings import ChatSettings

pytestmark = pytest.mark.vllm
QUESTION = [{"role": "user", "content": "Q"}]
TEMPERATURE = 0.7
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}, "word": {"enum": ["some", "été"]}},
    "required": ["digit", "word"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "strict": True, "parameters": DIGIT}}
SHOW = {
    "type": "function",
    "function": {
        "name": "show",
        "parameters": {
            "type": "object",
            "properties": {"word": {"$ref": "#/$defs/Word"}},
            "required": ["word"],
            "additionalProperties": False,
            "$defs": {"Word": {"enum": ["a", "b"]}},
        },
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_of_bytes):
    """A model with random weights, whose tokens are bytes."""
    tokenizer = tokenizer_of_bytes
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,  # vLLM's attention on a CPU takes 32, 64, ...
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    found = tmp_path_factory.mktemp("random")
    LlamaForCausalLM(config).save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def served(folder):
    overrides = [f"policy.generation.temperature={TEMPERATURE}", "policy.generation.vllm_cfg.precision=float32"]
    overrides += ["policy.generation.vllm_cfg.max_model_len=4096", "policy.generation.max_new_tokens=1000"]
    with started_model(str(folder), backend="vllm", overrides=overrides, name="random") as model:
        engine = EngineThread(model.generation)
        yield model, engine
        engine.close()


@pytest.fixture(scope="module")
def http(served):
    with TestClient(create_app(*served, limits=Limits())) as client:
        yield client


@pytest.fixture(scope="module")
def official(http):
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)


def log_softmax_of(folder, prompt, completion):
    """[T, V] log-probabilities of the tokens at each position of the completion, in plain Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


@pytest.mark.parametrize("greedy", [False, True])
def test_alternatives_have_the_log_probabilities_of_the_sampled_distribution(official, folder, greedy):
    more = {"logprobs": True, "seed": 1, "max_completion_tokens": 12, "extra_body": {"return_token_ids": True}}
    more |= {"temperature": 0} if greedy else {}
    choice = official.chat.completions.create(model="random", messages=QUESTION, top_logprobs=20, **more).choices[0]
    expected = log_softmax_of(folder, choice.prompt_token_ids, choice.token_ids)
    for entry, row in zip(choice.logprobs.content, expected, strict=True):
        assert [top.token_id for top in entry.top_logprobs] == row.topk(20).indices.tolist()
        found = torch.tensor([top.logprob for top in entry.top_logprobs])
        # Two float32 implementations of a model with logits of a few nats differ by less than 1e-4.
        torch.testing.assert_close(found, row.topk(20).values, rtol=0, atol=1e-4)
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [bytes(top.bytes) for top in entry.top_logprobs if top.token_id == entry.token_id] in ([], [bytes(entry.bytes)])


def test_completions_have_so_many_alternatives_by_text(official):
    more = {"prompt": "Go", "seed": 2, "max_tokens": 12}
    choice = official.completions.create(model="random", logprobs=3, **more).choices[0]
    plain = official.completions.create(model="random", logprobs=0, **more).choices[0]
    assert plain.logprobs.top_logprobs is None
    assert plain.logprobs.token_logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens) == 12
    for tops in choice.logprobs.top_logprobs:
        assert 1 <= len(tops) <= 3  # parts of characters have equal texts
        assert list(tops.values()) == sorted(tops.values()) or list(tops.values()) == sorted(tops.values(), reverse=True)


def test_streams_have_the_alternatives_of_their_new_tokens(official):
    request = {"model": "random", "messages": QUESTION, "seed": 3, "max_completion_tokens": 30, "logprobs": True}
    whole = official.chat.completions.create(**request, top_logprobs=4).choices[0].logprobs.content
    chunks = list(official.chat.completions.create(**request, top_logprobs=4, stream=True))
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert len(chunks) > 1
    assert [[top.token for top in entry.top_logprobs] for entry in streamed] == [
        [top.token for top in entry.top_logprobs] for entry in whole
    ]
    request = {"model": "random", "prompt": "Go", "seed": 3, "max_tokens": 30, "logprobs": 2}
    whole = official.completions.create(**request).choices[0].logprobs.top_logprobs
    chunks = official.completions.create(**request, stream=True)
    streamed = [tops for chunk in chunks for tops in chunk.choices[0].logprobs.top_logprobs]
    assert [sorted(tops) for tops in streamed] == [sorted(tops) for tops in whole]


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_writes_json_that_fits_the_schema(official, stream):
    request = {"model": "random", "messages": QUESTION, "response_format": json_schema(DIGIT), "n": 3, "seed": 5}
    if stream:
        texts = ["", "", ""]
        for chunk in official.chat.completions.create(**request, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    else:
        choices = official.chat.completions.create(**request).choices
        assert [choice.finish_reason for choice in choices] == ["stop"] * 3
        texts = [choice.message.content for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), DIGIT)


@pytest.mark.slow
def test_json_mode_writes_objects(official):
    request = {"model": "random", "messages": QUESTION, "response_format": {"type": "json_object"}, "n": 8, "seed": 1}
    choices = official.chat.completions.create(**request, max_completion_tokens=3000).choices
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert len(ended) > 4  # a random model may fill the rest of its context with one string
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_the_empty_schema_is_any_json(official):
    request = {"model": "random", "messages": QUESTION, "response_format": json_schema({}), "n": 8, "seed": 1}
    choices = official.chat.completions.create(**request, max_completion_tokens=1).choices
    assert all(choice.message.content.strip()[:1] in {"", *'{["-0123456789tfn'} for choice in choices)


def test_alternatives_in_json_mode_are_those_that_the_schema_allows(official):
    request = {"model": "random", "messages": QUESTION, "response_format": json_schema(DIGIT), "seed": 5, "logprobs": True}
    first, *_ = official.chat.completions.create(**request, top_logprobs=5).choices[0].logprobs.content
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("{", 0.0)]
    assert math.isclose(first.logprob, 0.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "show"}}])
def test_tool_choice_forces_calls_whose_arguments_fit_the_parameters(official, choice, stream):
    request = {"model": "random", "messages": QUESTION, "tools": [ADD, SHOW], "tool_choice": choice, "seed": 4}
    request |= {} if choice != "required" else {"parallel_tool_calls": False}
    if stream:
        *_, last = official.chat.completions.create(**request, stream=True)
        found, message = last.choices[0], last.choices[0].delta
    else:
        found = official.chat.completions.create(**request).choices[0]
        message = found.message
    assert found.finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert call.function.name in (["add", "show"] if choice == "required" else ["show"])
    tool = {"add": ADD, "show": SHOW}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
    assert not message.content


def test_calls_that_a_length_limit_cut_off_are_text(official):
    request = {"model": "random", "messages": QUESTION, "tools": [SHOW], "tool_choice": "required", "seed": 4}
    choice = official.chat.completions.create(**request, max_completion_tokens=3).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content.startswith("[")


NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": False}
CARD = {**NUMBERS, "required": ["a"]}
SHORT = {"type": "integer", "minimum": -20, "maximum": 20}
ENFORCED = [
    {"allOf": [{**SHORT, "maximum": 3}, {"minimum": 1}]},
    {"anyOf": [{"maximum": 3}, {"minimum": 18}], **SHORT},
    {"$defs": {"D": SHORT}, "$ref": "#/$defs/D", "minimum": 15},
    {"type": "string", "enum": ["a", 1, None]},
    {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 3},
    {"type": "object", "properties": {"a": SHORT}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
    {**SHORT, "multipleOf": 7},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=str)
def test_keywords_are_enforced_together(official, schema):
    request = {"model": "random", "messages": QUESTION, "response_format": json_schema(schema), "n": 6, "seed": 2}
    choices = official.chat.completions.create(**request, max_completion_tokens=400).choices
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


REFUSED = {
    "not": {**SHORT, "not": {"const": 3}},
    "if": {**CARD, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "dependentRequired": {**NUMBERS, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**NUMBERS, "dependentSchemas": {"a": {"required": ["b"]}}},
    "oneOf": {"oneOf": [{**SHORT, "minimum": 0}, {**SHORT, "maximum": 5}]},
    "uniqueItems": {"type": "array", "items": SHORT, "uniqueItems": True},
    "contains": {"type": "array", "items": SHORT, "contains": {"const": 7}},
    "look-around": {"type": "string", "pattern": "^(?=.*b)a.*$"},
}


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("as_tool", [False, True])
def test_a_schema_that_would_be_ignored_in_part_is_refused_with_its_keyword(http, keyword, as_tool):
    schema = {"type": "object", "properties": {"x": REFUSED[keyword]}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    more = {"tools": [tool], "tool_choice": "required"} if as_tool else {"response_format": json_schema(schema)}
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, **more})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools" if as_tool else "response_format")
    assert keyword in response.json()["error"]["message"]


SAME_NAME = {"type": "object", "properties": {}, "$defs": {"Word": {"type": "string"}}}
WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format", "response_format must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format must be"),
    ({"response_format": json_schema({"type": "nonsense"})}, "response_format", "does not accept the JSON schema"),
    ({"response_format": json_schema({"$ref": "#/$defs/none"})}, "response_format", "does not accept the JSON schema"),
    ({"response_format": json_schema({"type": "string", "maxLength": 10**9})}, "response_format", "maxLength above 100000"),
    ({"response_format": json_schema({"enum": ["a" * 70_000]})}, "response_format", "more than 65536 characters"),
    ({"response_format": json_schema(DIGIT), "tools": [SHOW]}, "response_format", "cannot be combined with tools"),
    ({"tool_choice": "required"}, "tool_choice", "the last two require tools"),
    ({"tools": [SHOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "with the name"),
    (
        {"tools": [SHOW, {"type": "function", "function": {"name": "f", "parameters": SAME_NAME}}], "tool_choice": "required"},
        "tools",
        "Two functions have different $defs named 'Word'",
    ),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs requires `logprobs: true`."),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
]


@pytest.mark.parametrize(("more", "param", "message"), WRONG)
def test_a_wrong_format_or_choice_gets_status_400_and_others_continue(http, more, param, message):
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, **more})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert http.post("/v1/completions", json={"prompt": "Go", "max_tokens": 2}).status_code == 200


def test_with_code_execution_json_mode_is_refused(served, needs_sandbox):
    with (
        open_chat_service(ChatSettings(code_execution=True)) as service,
        TestClient(create_app(*served, limits=Limits(), service=service)) as client,
    ):
        body = {"messages": QUESTION, "response_format": {"type": "json_object"}}
        error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert "response_format cannot be used, because this server runs code" in error["message"]
        text = {"messages": QUESTION, "response_format": {"type": "text"}, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=text).status_code == 200
