"""Streams send text and tokens as they are sampled; the deltas together are the answer without `stream`."""

import asyncio
import json
import threading

import openai
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, to_output
from rl_core.errors import WorkerDiedError, WorkerError
from rl_serve.chat_format import NO_TOOLS
from rl_serve.choices import ChatChoices, CompletionChoices
from rl_serve.engine import EngineThread, SampledRow, SamplingRow
from rl_serve.sampling import Limits, SamplingPlan
from rl_serve.served_model import started_model
from rl_serve.serving import create_app
from rl_serve.text import IncrementalText, cut_at_possible_stop, cut_at_stop
from rl_train.data.special_tokens import decode_answers, hidden_tokens

QUESTION = [{"role": "user", "content": "ab"}]
ONE_ROW = SamplingPlan(rows=[SamplingRow(prompt=[0], seed=0, max_new_tokens=1)], greedy=False)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def pieces_of(text):
    """The letters that stand for the bytes of a text in a vocabulary of bytes."""
    [(letters, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return letters


def tokenizer_of(inner):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<answer>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_level():
    """Single bytes and parts of characters of one to four bytes."""
    space, (first, second), euro, face = pieces_of(" "), pieces_of("é"), pieces_of("€"), pieces_of("😀")
    halves = [first, f"a{first}", f"{space}{first}", second, f"{second}b", f"{second}{space}"]
    parts = ["a", "b", space, *halves, euro[:2], euro[2], face]
    inner = Tokenizer(models.BPE(vocab={part: number for number, part in enumerate(dict.fromkeys(parts))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer_of(inner)


def byte_fallback():
    """Words with a leading space, and bytes for other characters, as in SentencePiece vocabularies."""
    parts = ["▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in "é€😀".encode())]
    inner = Tokenizer(
        models.BPE(vocab={part: number for number, part in enumerate(dict.fromkeys(parts))}, merges=[], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer_of(inner)


def metaspace():
    """As `byte_fallback`, with the decoder that drops the space of the first word by its place."""
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "byte fallback": byte_fallback(), "metaspace": metaspace()}


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(TOKENIZERS)), numbers=st.lists(st.integers(0, 30), max_size=250))
@example(kind="byte fallback", numbers=[0, *[5, 6, 7] * 60])
@example(kind="byte fallback", numbers=[0, 3, 4, 3])
@example(kind="byte fallback", numbers=[3, 4, 12, 3])
def test_the_text_of_unfinished_completions_only_grows_and_begins_the_whole_text(kind, numbers):
    tokenizer = TOKENIZERS[kind]
    tokens = [number % len(tokenizer) for number in numbers]
    [whole] = decode_answers(tokenizer, [tokens])
    reader = IncrementalText(tokenizer)
    texts = [reader.read(tokens[:length]) for length in range(len(tokens) + 1)]
    for text, longer in zip(texts, [*texts[1:], whole], strict=True):
        assert longer.startswith(text)


@given(text=st.text("abc", max_size=12), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_before_a_possible_stop_string_is_never_taken_back(text, stops):
    whole = cut_at_stop(text, stops)
    for length in range(len(text)):
        assert whole.startswith(cut_at_possible_stop(text[:length], stops))


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("bytes", ["a", pieces_of(" "), *pieces_of("é"), pieces_of("€")[:2], pieces_of("€")[2], pieces_of("😀")]),
        ("byte fallback", ["b", *(f"<0x{byte:02X}>" for byte in "é€😀".encode())]),
    ],
)
def test_the_bytes_of_sampled_tokens_together_are_those_of_the_text(kind, pieces):
    tokenizer = TOKENIZERS[kind]
    tokens = [*tokenizer.convert_tokens_to_ids(pieces), tokenizer.eos_token_id]
    found = bytes(byte for entry in logprobs_of(tokenizer, tokens) for byte in entry["bytes"])
    assert found.decode() == tokenizer.decode(tokens)
    assert "é€😀" in found.decode()


def logprobs_of(tokenizer, tokens, before=()):
    """The entries of tokens that follow others in a completion."""
    row = SampledRow(token_ids=tokens, logprobs=[-1.0] * len(tokens), truncated=False, weight_version=0, before=list(before))
    chat = {"chat": None, "messages": [], "tools": NO_TOOLS}
    return ChatChoices(tokenizer=tokenizer, plan=ONE_ROW, logprobs=True, **chat).token_logprobs(row)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    numbers=st.lists(st.integers(0, 30), max_size=20),
    cut=st.integers(0, 20),
)
@example(kind="byte fallback", numbers=[0, 1, 2, 0, *range(3, 12), 0, 1, 12], cut=3)
@example(kind="metaspace", numbers=[12, 0, 1, 2, 0, *range(3, 12), 0, 12], cut=1)
def test_leading_spaces_of_words_are_part_of_the_bytes_and_the_text_of_tokens(kind, numbers, cut):
    tokenizer = TOKENIZERS[kind]
    tokens = [number % len(tokenizer) for number in numbers]
    [text] = decode_answers(tokenizer, [tokens])
    assume("\N{REPLACEMENT CHARACTER}" not in text)
    # As in two events of a stream.
    entries = [*logprobs_of(tokenizer, tokens[:cut]), *logprobs_of(tokenizer, tokens[cut:], before=tokens[:cut])]
    shown = [entry for entry in entries if entry["token_id"] not in hidden_tokens(tokenizer)]
    assert bytes(byte for entry in shown for byte in entry["bytes"]).decode() == text


def test_offsets_of_tokens_count_the_spaces_before_words():
    tokenizer = TOKENIZERS["metaspace"]
    tokens = tokenizer.convert_tokens_to_ids(["▁a", "b", "▁a", "▁", "b"])
    row = SampledRow(token_ids=tokens, logprobs=[-1.0] * 5, truncated=True, weight_version=0)
    found = CompletionChoices(tokenizer=tokenizer, plan=ONE_ROW, logprobs=True).whole(0, row)
    assert found["text"] == "".join(found["logprobs"]["tokens"]) == "ab a b"
    assert found["logprobs"]["text_offset"] == [0, 1, 2, 4, 5]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """A model with random weights, which samples parts of characters, behind the server."""
    tokenizer = TOKENIZERS["bytes"]
    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with started_model(str(folder), backend="hf", overrides=["policy.generation.max_new_tokens=60"], name="random") as model:
        engine = EngineThread(model.generation)
        yield create_app(model, engine, limits=Limits())
        engine.close()


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app) as client:
        yield client


def events_of(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


def joined(choices, text_of):
    """The deltas of one choice as one choice."""
    *before, last = choices
    assert all(choice["finish_reason"] is None for choice in before)
    assert "prompt_token_ids" in choices[0]
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    logprobs = {key: [] for key in choices[0]["logprobs"] if choices[0]["logprobs"][key] is not None}
    for choice in choices:
        for key in logprobs:
            logprobs[key] += choice["logprobs"][key]
    return {
        "text": "".join(text_of(choice) for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
        "finish_reason": last["finish_reason"],
        "logprobs": logprobs,
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [None, ["€"], ["a b", "ba", "bé"]])
def test_the_deltas_of_all_choices_are_those_of_the_whole_answer(client, path, stop):
    is_chat = path == "/v1/chat/completions"
    asked = {"n": 12, "seed": 3, "return_token_ids": True, **({"stop": stop} if stop else {})}
    asked |= {"messages": QUESTION, "logprobs": True} if is_chat else {"prompt": "ab", "logprobs": 0}
    whole = client.post(path, json=asked).json()
    *events, done = events_of(client.post(path, json={**asked, "stream": True, "stream_options": {"include_usage": True}}))
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    assert chunks[-1]["usage"] == whole["usage"]
    found = {index: [] for index in range(12)}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]].append(choice)
    several = 0
    for expected in whole["choices"]:
        deltas = found[expected["index"]]
        if is_chat:
            assert [choice["delta"].get("role") for choice in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        got = joined(deltas, lambda choice: choice["delta"]["content"] if is_chat else choice["text"])
        assert got["text"] == (expected["message"]["content"] if is_chat else expected["text"])
        for key in ("token_ids", "prompt_token_ids", "finish_reason"):
            assert got[key] == expected[key]
        for key, values in got["logprobs"].items():
            if key == "token_logprobs":
                assert values == pytest.approx(expected["logprobs"][key], abs=1e-5)
            elif key == "content":
                assert [entry["token_id"] for entry in values] == expected["token_ids"]
            else:
                assert values == expected["logprobs"][key]
        several += len(deltas) > 1
    assert several > 6
    assert stop or "é" in json.dumps(whole, ensure_ascii=False), "no character of several bytes was sampled"


def test_without_logprobs_every_delta_but_the_last_has_text(client):
    events = events_of(client.post("/v1/completions", json={"prompt": "ab", "n": 12, "seed": 3, "stream": True}))
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert all(choice["text"] for choice in choices if choice["finish_reason"] is None)
    assert "prompt_token_ids" not in choices[0]
    assert len(choices) > 24


def official(client):
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)


def test_the_official_client_reads_deltas(client):
    asked = {"model": "random", "messages": QUESTION, "seed": 5, "max_completion_tokens": 40, "temperature": 0}
    whole = official(client).chat.completions.create(**asked).choices[0]
    chunks = list(official(client).chat.completions.create(**asked, stream=True))
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "It is <b>sunny</b> & <tool_ free.",
        f"Let me look. \n{CALL}\n{CALL}",
        f"\n\nLet me look. {CALL} Done.",
        f"\n{CALL}",
        f"<think>\nA <tool_call> may help.\n</think>\n\nLet me look.{CALL}",
        "Let me look.<tool_call>no JSON</tool_call>",
    ],
)
@pytest.mark.parametrize("limit", [None, 30])
def test_tool_calls_follow_the_text_before_them(serve_scripted, text, limit):
    http, _ = serve_scripted(lambda prompt: text, streams_tokens=True)
    asked = {"model": "scripted", "messages": QUESTION, "tools": [WEATHER], "max_completion_tokens": limit}
    whole = official(http).chat.completions.create(**asked).choices[0]
    choices = [chunk.choices[0] for chunk in official(http).chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == (whole.message.content or "")
    assert choices[-1].finish_reason == whole.finish_reason
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    expected = whole.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [call.function.arguments for call in expected]
    assert [call.index for call in calls] == list(range(len(expected)))
    assert bool(expected) == (text.count("</tool_call>") > 0 and "no JSON" not in text and limit is None)
    if "look" in text and limit is None:
        assert len([choice for choice in choices if choice.delta.content]) > 5, "the text arrived at once"


class Breaking:
    """An engine that streams one token of a row, and then fails or draws another first token."""

    streams_tokens = True

    def __init__(self, error=None):
        self._error = error

    def prepare_for_generation(self):
        return True

    async def generate_async(self, data, greedy=False):
        prompt = data["input_ids"][0].tolist()
        for token in (4, 5):
            row = Completion(prompt=prompt, tokens=[token], logprobs=[-1.0], truncated=False, weight_version=0)
            yield 0, BatchedDataDict({**to_output([row]), "unfinished": torch.tensor([True])})
            if self._error is not None:
                raise self._error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerDiedError("rank 0 exited. Its log has the reason."), "The engine failed: rank 0 exited."),
        (WorkerError("rank 0 failed"), "The engine failed: WorkerError."),
        (ZeroDivisionError(), "The server failed."),
        (None, "its tokens differ from those already sent"),
    ],
)
def test_an_error_after_the_first_token_is_an_event_that_the_official_client_raises(model, error, message):
    engine = EngineThread(Breaking(error))
    with TestClient(create_app(model, engine, limits=Limits())) as http:
        events = events_of(http.post("/v1/completions", json={"prompt": "1", "stream": True}))
        assert len(events) == 2
        assert json.loads(events[0])["choices"][0]["finish_reason"] is None
        assert message in json.loads(events[1])["error"]["message"]
        stream = official(http).completions.create(model="addition", prompt="1", stream=True)
        assert next(stream).choices[0].text
        with pytest.raises(openai.APIError, match=message):
            next(stream)
    engine.close()


def test_a_client_that_leaves_a_stream_ends_its_rows(model):
    """The engine never ends the row, so the response ends only with the client."""
    sent, cancelled = asyncio.Event(), threading.Event()

    class Endless(Breaking):
        async def generate_async(self, data, greedy=False):
            try:
                async for found in super().generate_async(data, greedy):
                    yield found
                    await asyncio.sleep(3600)
            finally:
                cancelled.set()

    engine = EngineThread(Endless())
    messages = [{"type": "http.request", "body": json.dumps({"prompt": "1", "stream": True}).encode()}]

    async def receive():
        if messages:
            return messages.pop()
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if b"choices" in message.get("body", b""):
            sent.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(create_app(model, engine, limits=Limits())(scope, receive, send))
    assert cancelled.wait(60)
    engine.close()
