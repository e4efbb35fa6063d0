"""`echo` with `logprobs` on `/v1/completions`: log-probabilities of prompt and completion, compared with Transformers."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rl_core.data.tokenizer import encode
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app

MODEL = Path(__file__).parents[2] / "examples/addition/model"
QUESTION = "12+34=46"


def complete(client, **body):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def plain_logprobs(folder, tokens):
    """[T - 1, V] float32, log-probabilities at temperature 1 of each token but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def own_logprobs(folder, tokens):
    return plain_logprobs(folder, tokens).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def test_echo_with_logprobs_has_those_of_the_prompt_and_of_the_completion(client, model):
    body = complete(client, prompt=QUESTION[:-2], echo=True, logprobs=3, max_tokens=4, seed=2, return_token_ids=True)
    [choice] = body["choices"]
    prompt = choice["prompt_token_ids"]
    logprobs, tokens = choice["logprobs"], prompt + choice["token_ids"]
    expected = plain_logprobs(MODEL, tokens)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    found = torch.tensor(logprobs["token_logprobs"][1:])
    torch.testing.assert_close(found, own_logprobs(MODEL, tokens), atol=1e-4, rtol=0)  # orders of float32 sums
    assert "".join(logprobs["tokens"]).startswith(choice["text"])  # the last token may be a hidden one
    assert [
        choice["text"][start:][: len(text)] for start, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ][: len(prompt)] == logprobs["tokens"][: len(prompt)]
    for at, tops in enumerate(logprobs["top_logprobs"][1 : len(prompt)]):
        texts = {model.tokenizer.decode([token]): logprob for token, logprob in enumerate(expected[at].tolist())}
        best = sorted(texts, key=texts.get, reverse=True)[:3]
        assert tops == pytest.approx({text: texts[text] for text in {*best, logprobs["tokens"][at + 1]}}, abs=1e-4)
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_the_prompt_is_scored_at_temperature_1_whatever_the_request_samples_with(client):
    plain = complete(client, prompt=QUESTION, echo=True, logprobs=1, max_tokens=1, temperature=0)
    own = {"temperature": 0.3, "top_p": 0.5, "top_k": 2, "repetition_penalty": 2.0, "n": 2}
    other = complete(client, prompt=QUESTION, echo=True, logprobs=1, max_tokens=1, **own)
    prompt = plain["choices"][0]["logprobs"]["token_logprobs"][: len(QUESTION)]
    for choice in other["choices"]:  # float32: another number of rows in the same pass
        assert choice["logprobs"]["token_logprobs"][1 : len(QUESTION)] == pytest.approx(prompt[1:], abs=1e-5)


def test_with_max_tokens_0_a_choice_is_the_prompt_alone(client, model):
    prompts = [encode(QUESTION, model.tokenizer), encode("1+1=", model.tokenizer)]
    body = complete(client, prompt=prompts, echo=True, logprobs=0, max_tokens=0)
    assert [choice["text"] for choice in body["choices"]] == [QUESTION, "1+1="]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        none, *logprobs = choice["logprobs"]["token_logprobs"]
        assert none is None
        torch.testing.assert_close(torch.tensor(logprobs), own_logprobs(MODEL, prompt), atol=1e-4, rtol=0)
        assert choice["logprobs"]["top_logprobs"] is None
    tokens = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    assert complete(client, prompt="1+1=", echo=True, max_tokens=0)["choices"][0]["text"] == "1+1="


def test_an_engine_that_does_not_report_them_is_named_in_the_refusal(model, engine):
    options = [option for option in model.row_options if option != "prompt_logprobs"]
    assert len(options) == len(model.row_options) - 1
    without = replace(model, row_options=options)
    with TestClient(create_app(without, engine, limits=Limits())) as client:
        response = client.post("/v1/completions", json={"prompt": "1", "echo": True, "logprobs": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "generation backend 'hf' does not report log-probabilities of the prompt" in error["message"]
    assert (error["param"], error["code"]) == ("echo", "unsupported_parameter")


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory, tokenizer_of_bytes):
    """A random model of bytes whose tokenizer begins texts with a token."""
    tokenizer, folder = (
        type(tokenizer_of_bytes)(tokenizer_object=tokenizer_of_bytes.backend_tokenizer),
        tmp_path_factory.mktemp("b"),
    )
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=8192, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with started_model(str(folder), backend="hf", overrides=["policy.generation.max_new_tokens=16"], name="bytes") as served:
        engine = EngineThread(served.generation)
        with TestClient(create_app(served, engine, limits=Limits())) as client:
            yield folder, served, client
        engine.close()


def test_offsets_count_neither_the_token_that_the_server_puts_before_a_text_nor_end_inside_it(of_bytes):
    folder, _, client = of_bytes
    [choice] = complete(client, prompt="Añb", echo=True, logprobs=2, max_tokens=0, return_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "A", "\ufffd", "\ufffd", "b"]  # ñ is two bytes
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
    found = torch.tensor(choice["logprobs"]["token_logprobs"][1:])
    torch.testing.assert_close(found, own_logprobs(folder, choice["prompt_token_ids"]), atol=1e-4, rtol=0)
    [choice] = complete(client, prompt=choice["prompt_token_ids"], echo=True, logprobs=2, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"][:2]) == ("<s>Añb", [0, 3])


def test_the_largest_alternative_of_a_position_is_the_token_only_if_it_is_the_most_likely_one(of_bytes):
    # As lm-evaluation-harness decides it, also if several tokens are parts of characters and have the same text.
    folder, _, client = of_bytes
    tokens = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = plain_logprobs(folder, tokens).argmax(-1).tolist()
    for at, token in enumerate(expected[:200]):  # half of the tokens are the most likely ones after their prefix
        tokens[at + 1] = token if at % 2 else tokens[at + 1]
    expected = plain_logprobs(folder, tokens).argmax(-1).tolist()
    [choice] = complete(client, prompt=tokens, echo=True, logprobs=1, max_tokens=0)["choices"]
    pairs = zip(choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True)
    greedy = [logprob == max(tops.values()) for logprob, tops in pairs]
    assert greedy == [token == best for token, best in zip(tokens[1:], expected, strict=True)]
    assert 2 < sum(greedy) < 300


def test_a_long_prompt_over_http_has_the_sum_of_its_log_probabilities(of_bytes, serve_http):
    folder, served, _ = of_bytes
    tokens = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(2)).tolist()

    engine = EngineThread(served.generation)
    port = serve_http(create_app(served, engine, limits=Limits()))
    body = {"prompt": [tokens, tokens[:4000]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    engine.close()
    expected = own_logprobs(folder, tokens)
    for choice, length in zip(answer["choices"], (5000, 4000), strict=True):
        found = torch.tensor(choice["logprobs"]["token_logprobs"][1:length])
        torch.testing.assert_close(found, expected[: length - 1], atol=1e-3, rtol=0)  # attention over 5000 float32 keys
