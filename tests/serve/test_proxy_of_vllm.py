"""The promised proxy in front of vLLM's own server: both are processes, started with their commands."""

import json
import shlex
import subprocess
import sys

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm_servers import kill, vllm_server

from rl_core.rendezvous.interfaces import free_port
from rl_train.prompts.templates import load_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full("starts vLLM's server, which takes half a minute; test_proxy.py has a proxy of our own server"),
]
LENGTH, WIDTH = 32768, 320
END, ANSWER, CALL = "<|im_end|>", "<|assistant|>", "<|caller|>"
ARGUMENTS = '\n{"name": "add", "arguments": {"a": 2}}\n'
FOLLOWS = [
    [ANSWER, "So ", "\\boxed{4}", ".", END],
    [CALL, "<tool_call>", ARGUMENTS, "</tool_call>", END],
    ["z", "z"],
    ["=", "So "],
]
"""Texts of tokens that follow each other; the first token of a row is the last one of a prompt."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + '\n' + (m['content'] or '') + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|caller|>' if tools else '<|assistant|>' }}{% endif %}"
)
PROBLEM = "What is 2 + 2?"
QUESTION = [{"role": "user", "content": PROBLEM}]
FILLED = load_prompt("generic/math").fill({"problem": PROBLEM})[0]["content"]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def make_model_that_says(folder):
    """A Llama whose next token depends on the last one only: its layers add nothing, and its output layer is a table."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token="<|pad|>")
    tokenizer.add_tokens([text for row in FOLLOWS for text in row if len(text) > 1 and text != END])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=WIDTH // 32,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    following = torch.full((WIDTH,), tokenizer.eos_token_id)
    for row in FOLLOWS:
        ids = tokenizer.convert_tokens_to_ids(row)
        following[ids[:-1]] = torch.tensor(ids[1:])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(WIDTH))
        model.lm_head.weight.zero_()
        model.lm_head.weight[following, torch.arange(WIDTH)] = 2.0  # 36 nats above all other tokens
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """vLLM's server, and the URL of the proxy, started with the promised command line."""
    folder = tmp_path_factory.mktemp("model")
    make_model_that_says(folder)
    port = free_port("127.0.0.1")
    command = (
        f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name says "
        f"--host 127.0.0.1 --port {port} --dtype float32 --max-model-len {LENGTH} --max-num-seqs 8 --enforce-eager "
        "--kv-cache-memory-bytes 268435456 --enable-scale-out --enable-auto-tool-choice --tool-call-parser hermes"
    )
    (folder / "proxy.yaml").write_text("server: {max_retries: 0}\n")
    words = (
        f"serve --config {folder / 'proxy.yaml'} ++server.server_type=vllm ++server.host=127.0.0.1 ++server.port={port} "
        "++prompt_config=generic/math ++generate_port=0"
    )
    with vllm_server(command, port, folder / "server.log") as server:
        proxy = subprocess.Popen(
            [sys.executable, "-m", "rlcore_cli.main", *shlex.split(words)], stdout=subprocess.PIPE, text=True
        )
        try:
            line = proxy.stdout.readline()
            assert line.startswith(f"serving nemo-skills from http://127.0.0.1:{port}/v1 on "), line
            yield server, line.rpartition(" ")[2].strip().removesuffix("/v1")
        finally:
            proxy.kill()
            proxy.wait()
            proxy.stdout.close()


@pytest.fixture
def client(servers):
    with openai.OpenAI(base_url=f"{servers[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def decoded(servers, tokens):
    """Text of the bytes of a prompt; other tokens are left out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return decoders.ByteLevel().decode([alphabet[token] for token in tokens if token < len(alphabet)])


def test_chat_fills_the_prompt_config_once_and_answers(servers, client):
    assert [model.id for model in client.models.list()] == ["nemo-skills", "says"]
    found = client.chat.completions.create(
        model="nemo-skills", messages=QUESTION, temperature=0.7, logprobs=True, extra_body={"return_token_ids": True}
    )
    [choice] = found.choices
    assert (choice.message.content, choice.finish_reason) == ("So \\boxed{4}.", "stop")
    assert [entry.token for entry in choice.logprobs.content][:3] == ["So ", "\\boxed{4}", "."]
    assert decoded(servers, found.prompt_token_ids) == f"user\n{FILLED}"


def test_generate_grades_the_answer(servers):
    def generate(**fields):
        response = httpx.post(f"{servers[1]}/generate", json=fields, timeout=100)
        assert response.status_code == 200, response.text
        return response.json()

    found = generate(question=PROBLEM, expected_answer="4")
    assert found == {
        "generation": "So \\boxed{4}.",
        "num_generated_tokens": 4,
        "finish_reason": "stop",
        "predicted_answer": "4",
        "is_correct": True,
    }
    assert generate(problem=PROBLEM, expected_answer=5)["is_correct"] is False


def test_streams_and_tool_calls_are_those_of_the_server(client):
    chunks = list(client.chat.completions.create(model="says", messages=QUESTION, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert ("".join(texts), chunks[-1].choices[0].finish_reason) == ("So \\boxed{4}.", "stop")
    assert len(texts) > 1
    choice = client.chat.completions.create(model="says", messages=QUESTION, tools=[ADD]).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert json.loads(call.function.arguments) == {"a": 2}
    deltas = [
        call
        for chunk in client.chat.completions.create(model="says", messages=QUESTION, tools=[ADD], stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert deltas[0].function.name == "add"
    assert json.loads("".join(call.function.arguments or "" for call in deltas)) == {"a": 2}


def test_token_endpoints_fill_nothing_and_errors_keep_their_message(servers, client):
    completion = client.completions.create(model="nemo-skills", prompt="2+2=", extra_body={"return_token_ids": True})
    assert completion.choices[0].text == "So \\boxed{4}."
    prompt = completion.choices[0].prompt_token_ids
    assert decoded(servers, prompt) == "2+2="
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 3, "temperature": 0}}
    found = httpx.post(f"{servers[1]}/inference/v1/generate", json=body, timeout=100).json()
    assert found["choices"][0]["token_ids"] == completion.choices[0].token_ids[:3]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.completions.create(model="says", prompt="1" * (LENGTH + 8), max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="There is no model 'other': this server has 'nemo-skills', 'says'"):
        client.completions.create(model="other", prompt="1")


def test_a_server_that_is_killed_ends_streams_with_an_error_and_gives_status_503(servers, client):
    server, url = servers
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": "nemo-skills"}
    stream = client.completions.create(model="says", prompt="z", max_tokens=LENGTH - 2, stream=True)
    assert next(stream).choices[0].text.startswith("z")
    kill(server)
    with pytest.raises(openai.APIError, match="The backend does not answer"):
        for _ in stream:
            pass
    for path, body in (("/v1/chat/completions", {"messages": QUESTION}), ("/generate", {"question": PROBLEM})):
        response = httpx.post(f"{url}{path}", json=body, timeout=100)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "backend_unavailable")
        assert "ConnectError" in response.json()["error"]["message"]
        assert response.headers["Retry-After"] == "1"
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "backend unavailable")
