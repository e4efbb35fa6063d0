"""The threads that tokenize and decode: they end with the server."""

import asyncio
import threading
from pathlib import Path

import openai
from starlette.testclient import TestClient

from rl_core.data.tokenizer import load_tokenizer
from rl_serve.agent_endpoint import AgentEndpoint
from rl_serve.engine import TokenizerThreads
from rl_train.agents.model_server import AgentTurn, ServerSettings, TurnSource

MODEL = Path(__file__).parents[2] / "examples/addition/model"


def tokenizer_threads_since(before):
    """The names of the threads for texts that were not there before."""
    return [thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("rl-serve-text")]


def test_no_thread_is_left_after_a_server_has_ended_which_may_then_be_started_again(scripted_app):
    before = threading.enumerate()
    app, _ = scripted_app(lambda prompt: "yes")
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/v1/completions", json={"prompt": "Go."}).json()["choices"][0]["text"] == "yes"
            assert tokenizer_threads_since(before)
        assert tokenizer_threads_since(before) == []


class Always46(TurnSource):
    """Answers every request of a rollout with the same text."""

    def __init__(self, tokenizer):
        self._tokens = tokenizer("46")["input_ids"]

    async def sample(self, request):
        tokens = list(self._tokens)
        logprobs = [-0.5] * len(tokens)
        return AgentTurn(prompt=list(request.prompt), token_ids=tokens, logprobs=logprobs, truncated=False, weight_version=0)


def test_no_thread_is_left_after_the_endpoint_of_agents_has_ended():
    before, tokenizer = threading.enumerate(), load_tokenizer(str(MODEL))
    endpoint = AgentEndpoint(ServerSettings(tokenizer=tokenizer, model="m", temperature=1.0))
    try:
        key = endpoint.open(Always46(tokenizer))
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0)
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "12+34="}])
        assert answer.choices[0].message.content == "46"
        assert tokenizer_threads_since(before)
    finally:
        endpoint.shutdown()
    assert tokenizer_threads_since(before) == []


def test_the_end_waits_for_what_runs_while_the_event_loop_continues():
    before = threading.enumerate()
    started, go_on = threading.Event(), threading.Event()

    def work():
        started.set()
        return go_on.wait(60)

    async def scenario():
        threads = TokenizerThreads()
        working = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(started.wait, 60)
        ending = asyncio.ensure_future(threads.close())
        await asyncio.sleep(0)
        assert not ending.done()
        go_on.set()
        await ending
        assert await working
        await threads.close()

    asyncio.run(scenario())
    assert tokenizer_threads_since(before) == []
