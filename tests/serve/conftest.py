"""Served models: the addition model by the Transformers engine in this process, and an engine with scripted answers."""

import socket
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn
from isolation import require_isolation
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, to_output
from rl_serve.edge import server_config
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import ServedModel, started_model
from rl_serve.serving import create_app

MODEL = Path(__file__).parents[2] / "examples/addition/model"


@pytest.fixture(scope="session")
def model():
    with started_model(str(MODEL), backend="hf", overrides=["policy.generation.max_new_tokens=16"], name="addition") as served:
        yield served


@pytest.fixture(scope="session")
def engine(model):
    thread = EngineThread(model.generation)
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def client(model, engine):
    with TestClient(create_app(model, engine, limits=Limits())) as client:
        yield client


HERMES = (
    "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer():
    """A tokenizer of bytes with a chat template that writes tool calls in the form of Hermes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = HERMES
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of_bytes():
    return byte_tokenizer()


class ScriptedGeneration:
    """An engine whose completion is a function of the prompt's text, for tests of what the server does with completions."""

    def __init__(self, tokenizer, answer, *, streams_tokens):
        self._tokenizer, self._answer = tokenizer, answer
        self.streams_tokens = streams_tokens
        self.prompts = []

    def prepare_for_generation(self):
        return True

    async def generate_async(self, data, greedy=False):
        for row, length in enumerate(data["input_lengths"].tolist()):
            prompt = data["input_ids"][row, :length].tolist()
            self.prompts.append(self._tokenizer.decode(prompt))
            tokens = self._tokenizer(self._answer(self.prompts[-1]))["input_ids"] + [self._tokenizer.eos_token_id]
            limit = int(data["max_new_tokens"][row])
            if "stream_tokens" in data:
                for length in range(1, len(tokens[:limit])):
                    yield row, unfinished(prompt, tokens[:length])
            completion = Completion(
                prompt=prompt,
                tokens=tokens[:limit],
                logprobs=[-0.5] * len(tokens[:limit]),
                truncated=len(tokens) > limit,
                weight_version=3,
            )
            yield row, to_output([completion])


def unfinished(prompt, tokens):
    """The output of a row that is still sampled."""
    row = Completion(prompt=prompt, tokens=tokens, logprobs=[-0.5] * len(tokens), truncated=True, weight_version=3)
    return BatchedDataDict({**to_output([row]), "unfinished": torch.tensor([True])})


@contextmanager
def http_server(app):
    """The application on a free port of loopback, in a thread; yields the port and the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = server_config(app, drain_s=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def serve_http():
    """Starts applications on free ports of loopback; returns the port of each."""
    with ExitStack() as exits:
        yield lambda app: exits.enter_context(http_server(app))[0]


@pytest.fixture
def scripted_app():
    """Applications of an engine that answers with a function of the prompt; returns the application and the engine."""
    threads = []

    def make(answer, *, temperature=1.0, streams_tokens=False, **options):
        tokenizer = byte_tokenizer()
        generation = ScriptedGeneration(tokenizer, answer, streams_tokens=streams_tokens)
        served = ServedModel(
            name="scripted",
            backend="scripted",
            generation=generation,
            tokenizer=tokenizer,
            temperature=temperature,
            top_p=1.0,
            max_new_tokens=1000,
            max_model_len=20_000,
            vocab_size=len(tokenizer),
        )
        thread = EngineThread(generation)
        threads.append(thread)
        return create_app(served, thread, limits=Limits(), **options), generation

    yield make
    for thread in threads:
        thread.close()


@pytest.fixture
def serve_scripted(scripted_app):
    """Serves an engine that answers with a function of the prompt; returns a client and the engine."""
    with ExitStack() as exits:

        def serve(answer, **options):
            app, generation = scripted_app(answer, **options)
            return exits.enter_context(TestClient(app)), generation

        yield serve


@pytest.fixture(scope="session")
def needs_sandbox():
    require_isolation()
