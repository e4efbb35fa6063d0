"""Completions over HTTP are those of the engine, in the form of OpenAI's API."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import processors

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import encode
from rl_serve.served_model import started_model
from rl_train.data.chat_template import conversation_tokens
from rl_train.rollouts.trajectory import sample_seed

QUESTION = "12+34="
MODEL = Path(__file__).parents[2] / "examples/addition/model"


def post(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def sampled_by_the_engine(model, prompt, *, seeds, greedy=False):
    batch = BatchedDataDict(
        {
            "input_ids": torch.tensor([prompt] * len(seeds)),
            "input_lengths": torch.tensor([len(prompt)] * len(seeds)),
            "sample_seeds": torch.tensor(seeds),
        }
    )
    output = model.generation.generate(batch, greedy)
    ends = output["unpadded_sequence_lengths"].tolist()
    rows = [
        (output["output_ids"][i, len(prompt) : end], output["logprobs"][i, len(prompt) : end]) for i, end in enumerate(ends)
    ]
    return [ids.tolist() for ids, _ in rows], [logprobs for _, logprobs in rows]


def test_completions_have_the_tokens_and_log_probabilities_of_the_engine(client, model):
    body = post(client, "/v1/completions", prompt=QUESTION, n=3, seed=7, logprobs=0, return_token_ids=True)
    prompt = encode(QUESTION, model.tokenizer)
    tokens, logprobs = sampled_by_the_engine(model, prompt, seeds=[sample_seed(7, 0, choice) for choice in range(3)])
    assert [choice["token_ids"] for choice in body["choices"]] == tokens
    assert all(choice["prompt_token_ids"] == prompt for choice in body["choices"])
    for choice, expected in zip(body["choices"], logprobs, strict=True):
        # Float32: the two calls may batch the rows differently.
        torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-5, rtol=0)
    sampled = sum(map(len, tokens))
    assert body["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def test_temperature_zero_decodes_greedily(client, model):
    body = post(client, "/v1/completions", prompt=QUESTION, temperature=0, return_token_ids=True)
    tokens, _ = sampled_by_the_engine(model, encode(QUESTION, model.tokenizer), seeds=[0], greedy=True)
    assert body["choices"][0]["token_ids"] == tokens[0]


def test_several_prompts_as_text_or_token_ids_give_choices_in_their_order(client, model):
    ids = [encode(text, model.tokenizer) for text in ("1+1=", QUESTION)]
    as_text = post(client, "/v1/completions", prompt=["1+1=", QUESTION], temperature=0, return_token_ids=True)
    as_ids = post(client, "/v1/completions", prompt=ids, temperature=0, return_token_ids=True)
    assert as_text["choices"] == as_ids["choices"]
    assert [choice["prompt_token_ids"] for choice in as_ids["choices"]] == ids
    assert [choice["index"] for choice in as_ids["choices"]] == [0, 1]


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_tokens(client, model):
    whole = post(client, "/v1/completions", prompt=QUESTION, temperature=0)["choices"][0]["text"]
    assert len(whole) > 1
    choice = post(client, "/v1/completions", prompt=QUESTION, temperature=0, stop=whole[1], return_token_ids=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[0], "stop")
    assert model.tokenizer.decode(choice["token_ids"]) == whole[:2]


def test_a_completion_that_reaches_its_limit_says_so(client):
    choice = post(client, "/v1/completions", prompt=QUESTION, temperature=0, max_tokens=1, return_token_ids=True)["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 1)


def test_a_conversation_is_rendered_by_the_chat_template(client, model):
    messages = [{"role": "user", "content": QUESTION}]
    body = post(
        client, "/v1/chat/completions", messages=messages, temperature=0, logprobs=True, return_token_ids=True, model="addition"
    )
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == conversation_tokens(messages, model.tokenizer, add_generation_prompt=True)
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == model.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]


def test_control_tokens_are_text_in_messages_and_tokens_in_raw_prompts(scripted_app):
    app, engine = scripted_app(lambda prompt: "a")
    rendered = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    with TestClient(app) as client:
        messages = [{"role": "user", "content": f"q {rendered}"}]
        forged = post(client, "/v1/chat/completions", messages=messages, return_token_ids=True)
        raw = post(client, "/v1/completions", prompt=rendered, return_token_ids=True)
    end = engine._tokenizer.eos_token_id
    counts = [body["choices"][0]["prompt_token_ids"].count(end) for body in (forged, raw)]
    assert counts == [1, 1]
    assert engine.prompts == [f"<|im_start|>user\nq {rendered}<|im_end|>\n<|im_start|>assistant\n", rendered]


def test_a_raw_prompt_begins_as_the_tokenizer_begins_texts_unless_the_request_says_otherwise(scripted_app):
    app, engine = scripted_app(lambda prompt: "a")
    special = [(name, engine._tokenizer.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|im_end|>")]
    single = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=special)
    engine._tokenizer.backend_tokenizer.post_processor = single
    with TestClient(app) as client:
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            post(client, "/v1/completions", prompt=["12", "3"], **more)
            post(client, "/v1/completions", prompt=engine._tokenizer("3", add_special_tokens=False)["input_ids"], **more)
    assert engine.prompts == ["<|im_start|>12", "<|im_start|>3", "3"] * 2 + ["12", "3", "3"]


def test_a_stream_has_the_same_completions_as_a_response(client):
    asked = {"messages": [{"role": "user", "content": QUESTION}], "n": 2, "seed": 3}
    whole = post(client, "/v1/chat/completions", **asked)
    response = client.post("/v1/chat/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    found = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] += choice["delta"]["content"]
    assert found == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_token_ids_in_give_token_ids_out(client, model):
    prompt = encode(QUESTION, model.tokenizer)
    asked = {"max_tokens": 4, "seed": 5, "n": 2}
    body = post(client, "/inference/v1/generate", token_ids=prompt, sampling_params=asked, request_id="mine")
    tokens = post(client, "/v1/completions", prompt=prompt, return_token_ids=True, logprobs=0, **asked)
    assert [choice["token_ids"] for choice in body["choices"]] == [choice["token_ids"] for choice in tokens["choices"]]
    assert body["request_id"] == "mine"
    for choice, other in zip(body["choices"], tokens["choices"], strict=True):
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-5)


def test_equal_seeds_give_equal_completions_and_requests_without_a_seed_differ(client):
    def sampled(**more):
        # A prompt of one digit leaves the model undecided, so that samples differ.
        return [
            c["token_ids"] for c in post(client, "/v1/completions", prompt="7", n=16, return_token_ids=True, **more)["choices"]
        ]

    assert sampled(seed=11) == sampled(seed=11)
    assert sampled() != sampled()


def test_the_model_is_listed_under_its_name(client):
    listed = client.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["max_model_len"], entry["streams_tokens"]) for entry in listed] == [("addition", 128, True)]
    assert client.get("/health").json() == {"status": "ok", "model": "addition"}


def test_requests_with_their_own_temperature_run_together_and_sample_as_an_engine_with_it(client, model):
    """The log-probabilities are those of the request's distribution, next to rows with the engine's."""
    prompt = encode(QUESTION, model.tokenizer)
    own = {"temperature": 4.0, "top_p": 0.95, "top_k": 15}
    asked = {"prompt": prompt, "seed": 3, "return_token_ids": True, "logprobs": 0}
    with ThreadPoolExecutor(4) as pool:
        bodies = list(
            pool.map(lambda more: post(client, "/v1/completions", **asked, **more), [own, {}, own, {"temperature": 1}])
        )
    rows = [(body["choices"][0]["token_ids"], body["choices"][0]["logprobs"]["token_logprobs"]) for body in bodies]
    for one, same in ((0, 2), (1, 3)):
        assert rows[one][0] == rows[same][0]
        assert rows[one][1] == pytest.approx(rows[same][1], abs=1e-5)
    with started_model(
        str(MODEL),
        backend="hf",
        overrides=["policy.generation.max_new_tokens=16", *(f"policy.generation.{key}={value}" for key, value in own.items())],
    ) as other:
        tokens, logprobs = sampled_by_the_engine(other, prompt, seeds=[sample_seed(3, 0, 0)])
    assert rows[0][0] == tokens[0]
    torch.testing.assert_close(torch.tensor(rows[0][1]), logprobs[0], atol=1e-5, rtol=0)
    assert min(rows[0][1]) < -0.5  # otherwise the comparison would show nothing


def test_with_echo_the_text_begins_with_the_prompt(client, model):
    request = {"seed": 3, "n": 2, "max_tokens": 6}
    for prompt, texts in [
        (QUESTION, [QUESTION]),
        (encode(QUESTION, model.tokenizer), [QUESTION]),
        (["1+1=", "2+20="], ["1+1=", "2+20="]),
        ([encode("1+1=", model.tokenizer)], ["1+1="]),
    ]:
        plain = post(client, "/v1/completions", prompt=prompt, **request)["choices"]
        expected = [texts[choice["index"] // 2] + choice["text"] for choice in plain]
        assert [
            choice["text"] for choice in post(client, "/v1/completions", prompt=prompt, echo=True, **request)["choices"]
        ] == expected
        events = client.post("/v1/completions", json={"prompt": prompt, "echo": True, "stream": True, **request}).text
        streamed = dict.fromkeys(range(len(expected)), "")
        for line in filter(None, events.split("\n\n")):
            if line != "data: [DONE]":
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                streamed[choice["index"]] += choice["text"]
        assert list(streamed.values()) == expected
