"""Agents with their own control loop sample from the training engine through the official OpenAI client, and are recorded."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, to_output
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, RLCoreError, UserError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_serve.agent_endpoint import AgentEndpoint
from rl_train.agents.driver import AgentDriver
from rl_train.agents.model_server import ServerSettings
from rl_train.agents.session import SessionLimits
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch

MODEL = Path(__file__).parents[2] / "examples/addition/model"

LENGTH = 48


class RecordingEngine(HuggingFaceGeneration):
    """Keeps a log of what it read and sampled. Yields each token of a row that streams, independent of time."""

    broken = False
    cancelled = None
    """Event that is set when a row is cancelled, which then waits after its first token."""

    async def generate_async(self, data, greedy=False):
        if self.broken:
            raise RLCoreError("the engine is broken")
        prompt = data["input_ids"][0, : int(data["input_lengths"][0])].tolist()
        async for row, output in super().generate_async(data, greedy):
            if "unfinished" in output:
                continue
            end = int(output["unpadded_sequence_lengths"][0])
            sampled = slice(len(prompt), end)
            for length in range(1, end - len(prompt)) if "stream_tokens" in data else ():
                yield row, self.so_far(output, len(prompt), length)
                if self.cancelled is not None:
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        self.cancelled.set()
            self.log.append((prompt, output["output_ids"][0, sampled].tolist(), output["logprobs"][0, sampled].tolist()))
            yield row, output

    def so_far(self, output, start, length):
        part = Completion(
            prompt=output["output_ids"][0, :start].tolist(),
            tokens=output["output_ids"][0, start : start + length].tolist(),
            logprobs=output["logprobs"][0, start : start + length].tolist(),
            truncated=True,
            weight_version=int(output["weight_version"][0]),
        )
        return BatchedDataDict({**to_output([part]), "unfinished": torch.tensor([True])})


@pytest.fixture(scope="module")
def sampler():
    engine = RecordingEngine(str(MODEL), max_new_tokens=4, max_model_len=LENGTH, torch_dtype="float32")
    engine.log = []
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def endpoint(tokenizer):
    server = AgentEndpoint(ServerSettings(tokenizer=tokenizer, model="addition", temperature=1.0))
    yield server
    server.shutdown()


class Nothing(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        raise NotImplementedError


class Lengths(EnvironmentInterface):
    """The reward is the number of messages."""

    def step(self, message_log_batch, metadata):
        n = len(metadata)
        rewards = torch.tensor([float(len(log)) for log in message_log_batch])
        answers = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn([{"role": "user", "content": ""}] * n, metadata, [None] * n, rewards, torch.ones(n), answers)


@pytest.fixture
def played(sampler, endpoint, tokenizer):
    sampler.log.clear()
    sampler.broken, sampler.cancelled = False, None

    def play(agent, rows=1, *, environment=None, max_turns=10, timeout_s=60.0):
        driver = AgentDriver(
            agent,
            endpoint,
            tokenizer,
            model="addition",
            limits=SessionLimits(max_turns=max_turns, max_total_length=LENGTH, max_new_tokens=4),
            timeout_s=timeout_s,
            task_name="t",
            returns_reward=environment is None,
        )
        collector = Collector(
            generation=sampler,
            environments={"t": environment or Nothing()},
            tokenizer=tokenizer,
            seed=5,
            max_turns={"t": max_turns},
            max_total_length=LENGTH,
            drivers={"t": driver},
        )
        trajectories = [
            Trajectory(
                message_log=[
                    {"role": "user", "content": f"{n}+2=", "token_ids": torch.tensor(tokenizer(f"{n}+2=")["input_ids"])}
                ],
                metadata={"row": n},
                task_name="t",
                group_id=n,
                index=n,
                ordinal=n,
                sample=0,
            )
            for n in range(rows)
        ]
        collector.collect(trajectories, stream=SampleStream.TRAINING)
        return trajectories

    return play


def client_of(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def talks(base_url, api_key, model, messages, metadata):
    """Three turns; the third after the history was rewritten."""
    client = client_of(base_url, api_key)
    history = list(messages)
    for turn in range(2):
        answer = client.chat.completions.create(model=model, messages=history)
        history += [answer.choices[0].message, {"role": "user", "content": f"+{turn}="}]
    rewritten = [{"role": "user", "content": f"{metadata['row']}*7="}]
    client.chat.completions.create(model=model, messages=rewritten)
    return float(metadata["row"])


def assert_recorded(rows, log):
    """Every turn of the engine's log is recorded once, with the tokens that the engine read before it."""
    batch = to_batch(rows)
    found = []
    for row, length in enumerate(batch["input_lengths"].tolist()):
        turns = batch["token_turns"][row, :length]
        for turn in sorted({*turns.tolist()} - {0}):
            place = (turns == turn).nonzero().flatten()
            start, end = int(place[0]), int(place[-1]) + 1
            assert place.tolist() == list(range(start, end))
            ids = batch["input_ids"][row].tolist()
            found.append((ids[:start], ids[start:end], batch["generation_logprobs"][row, start:end].tolist()))
    assert sorted(found) == sorted(log)
    return batch


def test_recorded_tokens_are_those_of_the_engine_also_after_the_history_was_rewritten(played, sampler):
    rows = played(talks, 3)
    batch = assert_recorded(rows, sampler.log)
    assert [row.turns for row in rows] == [3, 3, 3]
    assert [len(row.segments) for row in rows] == [2, 2, 2]
    assert batch["turn_rewards"][::2] == [[0.0, 0.0, float(n)] for n in range(3)]
    assert [row.reward for row in rows] == [0.0, 1.0, 2.0]
    assert batch["token_versions"][batch["token_mask"] > 0].unique().tolist() == [-1]
    # Each turn of a conversation continues the tokens that were sampled, although the client sent text.
    policy = HuggingFacePolicy(str(MODEL), max_total_sequence_length=LENGTH)
    scored = policy.get_logprobs(batch)["logprobs"] * batch["token_mask"]
    torch.testing.assert_close(scored, batch["generation_logprobs"], rtol=0, atol=1e-4)
    policy.shutdown()
    record = rollout_records(rows)[0]
    assert [len(segment["tokens"]) for segment in record["segments"]] == batch["input_lengths"][:2].tolist()


async def talks_async(base_url, api_key, **_):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    first = {"role": "user", "content": "1+1="}
    stream = await client.chat.completions.create(model="addition", messages=[first], stream=True, logprobs=True)
    roles = [chunk.choices[0].delta.role async for chunk in stream]
    assert roles == ["assistant", *[None] * (len(roles) - 1)]
    assert [model.id async for model in client.models.list()] == ["addition"]
    assert (await client.models.retrieve("addition")).id == "addition"
    return {"right": 1.0, "style": 0.5}


def test_asynchronous_agents_stream_and_return_named_rewards(played, sampler):
    rows = played(talks_async, 2)
    assert_recorded(rows, sampler.log)
    assert [row.reward_parts for row in rows] == [{"right": 1.0, "style": 0.5}] * 2
    assert all(row.scored and row.done for row in rows)


def test_streamed_turns_are_recorded_like_others_and_their_deltas_are_the_recorded_turns(played, sampler):
    deltas = []

    def agent(base_url, api_key, model, messages, metadata, *, stream):
        client = client_of(base_url, api_key)
        history = list(messages)
        for turn in range(2):
            asked = {"model": model, "messages": history, "logprobs": True, "extra_body": {"return_token_ids": True}}
            if not stream:
                text = client.chat.completions.create(**asked).choices[0].message.content
            else:
                chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
                assert chunks.pop().usage.completion_tokens == len(chunks)
                choices = [chunk.choices[0] for chunk in chunks]
                text = "".join(choice.delta.content for choice in choices)
                deltas.append(choices)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"+{turn}="}]
        return 1.0

    # One rollout at a time, because log-probabilities of batches of other sizes may differ in their last bits.
    whole = played(partial(agent, stream=False))
    expected, log = to_batch(whole), list(sampler.log)
    sampler.log.clear()
    streamed = played(partial(agent, stream=True))
    found = assert_recorded(streamed, sampler.log)
    assert sampler.log == log
    for key in ("input_ids", "token_mask", "generation_logprobs", "token_versions", "token_turns"):
        assert torch.equal(found[key], expected[key]), key
    assert [row.conversation() for row in streamed] == [row.conversation() for row in whole]
    turns = [
        (
            choices[0].prompt_token_ids,
            [token for choice in choices for token in choice.token_ids],
            [entry.logprob for choice in choices for entry in choice.logprobs.content],
        )
        for choices in deltas
    ]
    assert turns == log
    assert all(len(choices) == len(tokens) for choices, (_, tokens, _) in zip(deltas, turns, strict=True))
    assert max(map(len, deltas)) > 1


def test_a_client_that_leaves_a_stream_cancels_the_turn_which_is_not_recorded(played, sampler):
    def agent(base_url, api_key, model, messages, metadata):
        sampler.cancelled = threading.Event()
        with client_of(base_url, api_key).chat.completions.create(model=model, messages=messages, stream=True) as stream:
            assert next(stream).choices[0].finish_reason is None
        assert sampler.cancelled.wait(60)
        sampler.cancelled = None
        asks_once(base_url, api_key, model, messages)
        return 1.0

    [row] = played(agent)
    assert (row.turns, row.scored) == (1, True), row.failure
    assert_recorded([row], sampler.log)


def holding(calls, method):
    """A method of the tokenizer that waits until the event that it puts into a queue is set; False is put if it never is."""

    def wait(*arguments, **options):
        go_on = threading.Event()
        calls.put(go_on)
        if not go_on.wait(60):
            calls.put(False)
        return method(*arguments, **options)

    return wait


@pytest.mark.parametrize("stream", [False, True])
def test_other_agents_are_answered_while_a_turn_is_tokenized_and_decoded(played, sampler, monkeypatch, stream):
    monkeypatch.setattr(RecordingEngine, "streams_tokens", False)
    held = []

    def request(client, calls, model, history):
        try:
            found = client.chat.completions.create(model=model, messages=history, stream=stream, logprobs=True)
            return "".join(chunk.choices[0].delta.content for chunk in found) if stream else found.choices[0].message.content
        finally:
            calls.put(None)

    def agent(base_url, api_key, model, messages, metadata):
        client, calls, history = client_of(base_url, api_key), queue.Queue(), list(messages)
        with ThreadPoolExecutor(1) as pool:
            for turn in range(2):
                with monkeypatch.context() as patch:
                    for name in ("__call__", "decode", "batch_decode"):
                        patch.setattr(PreTrainedTokenizerFast, name, holding(calls, getattr(PreTrainedTokenizerFast, name)))
                    asking = pool.submit(request, client, calls, model, history)
                    while (go_on := calls.get()) is not None:
                        held.append(go_on)
                        assert go_on
                        assert [one.id for one in client.models.list()] == ["addition"]
                        go_on.set()
                    history += [{"role": "assistant", "content": asking.result()}, {"role": "user", "content": f"+{turn}="}]
        return 1.0

    [row] = played(agent)
    assert row.failure is None
    assert_recorded([row], sampler.log)
    assert len(held) > 2 * 3


def test_errors_before_the_first_token_of_a_stream_have_their_status(played, sampler):
    def agent(base_url, api_key, model, messages, metadata):
        create = client_of(base_url, api_key).chat.completions.create
        asks_once(base_url, api_key, model, messages)
        with pytest.raises(openai.BadRequestError, match="already used all 1 turns"):
            create(model=model, messages=messages, stream=True)
        return 1.0

    [row] = played(agent, max_turns=1)
    assert (row.truncated, row.scored) == (True, True), row.failure


def test_equal_seeds_give_equal_rollouts_and_prompts_differ(played):
    one, other = played(talks, 2), played(talks, 2)
    assert [row.conversation() for row in one] == [row.conversation() for row in other]


def asks_once(base_url, api_key, model, messages):
    client_of(base_url, api_key).chat.completions.create(model=model, messages=messages)


def test_without_a_return_value_the_environment_scores_the_last_conversation(played):
    [row] = played(asks_once, environment=Lengths())
    assert (row.reward, row.scored, row.answer) == (2.0, True, row.conversation()[-1]["content"])
    with pytest.raises(ConfigError, match=r"env\.t: the agent returned 0\.0, but the task has an environment"):
        played(talks, environment=Lengths())


def test_an_agent_that_returns_none_without_an_environment_is_not_scored(played):
    [row] = played(asks_once)
    assert (row.scored, row.failure, row.turns) == (False, None, 1)


def test_return_values_that_are_not_rewards_stop_the_run(played):
    def agent(**arguments):
        asks_once(*(arguments[name] for name in ("base_url", "api_key", "model", "messages")))
        return "good"

    with pytest.raises(UserError, match=r"env\.t\.agent returned 'good' \(str\) as a reward"):
        played(agent)


def test_an_agent_may_return_numbers_of_other_libraries(played):
    def agent(base_url, api_key, model, messages):
        asks_once(base_url, api_key, model, messages)
        return {"a": np.float32(0.5), "b": torch.tensor(True), "c": None}

    assert [row.turn_rewards[-1] for row in played(agent)] == [{"a": 0.5, "b": 1.0}]


def test_a_failing_agent_leaves_only_its_own_row_unscored(played):
    def agent(base_url, api_key, model, messages, metadata):
        asks_once(base_url, api_key, model, messages)
        if metadata["row"] == 1:
            raise KeyError("shape")
        if metadata["row"] == 2:
            raise SystemExit(3)
        return 1.0

    rows = played(agent, 4)
    assert [row.scored for row in rows] == [True, False, False, True]
    assert [row.failure for row in rows[1:3]] == ["KeyError: 'shape'", "RuntimeError: SystemExit: 3"]
    assert rows[1].turns == 1
    assert to_batch(rows)["sample_mask"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_an_agent_that_samples_nothing_is_not_scored(played):
    [row] = played(lambda base_url: 1.0)
    assert row.failure == "AgentWithoutTurnError: the agent ended without sampling a turn"


def test_after_the_timeout_the_row_is_not_scored_and_its_key_is_refused(played):
    released, ended, refused = threading.Event(), threading.Event(), []

    def agent(base_url, api_key, model, messages):
        released.wait()
        try:
            asks_once(base_url, api_key, model, messages)
        except openai.AuthenticationError as error:
            refused.append(error.code)
        finally:
            ended.set()

    [row] = played(agent, timeout_s=0.1)
    assert not row.scored
    assert row.failure == "AgentTimeoutError: the agent did not return within 0.1 s (env.t.agent_timeout_s)"
    released.set()
    assert ended.wait(60)
    assert refused == ["invalid_api_key"]


def test_clients_close_idle_connections_before_the_endpoint_does(endpoint):
    # Otherwise a client may send a request on a connection that is being closed, which fails without retries.
    assert endpoint._server.config.timeout_keep_alive > 2 * openai.DefaultHttpxClient()._transport._pool._keepalive_expiry


def test_keys_of_ended_rollouts_and_unknown_keys_are_refused(played, endpoint):
    keys = []

    def agent(base_url, api_key, model, messages):
        keys.append(api_key)
        asks_once(base_url, api_key, model, messages)
        return 0.0

    played(agent, 2)
    assert len(set(keys)) == 2
    for key in [*keys, "guess"]:
        with pytest.raises(openai.AuthenticationError, match="no rollout with this key"):
            client_of(endpoint.base_url, key).chat.completions.create(
                model="addition", messages=[{"role": "user", "content": "1"}]
            )
        with pytest.raises(openai.AuthenticationError):
            client_of(endpoint.base_url, key).models.list()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"expected_answer": "3"}}, "expected_answer"),
        ({"n": 2}, "n"),
        ({"seed": 3}, "seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_settings_that_would_change_the_sampled_distribution_are_refused(played, options, param):
    found = []

    def agent(base_url, api_key, model, messages):
        with pytest.raises(openai.BadRequestError) as raised:
            client_of(base_url, api_key).chat.completions.create(model=model, messages=messages, **options)
        found.append(raised.value.param)
        asks_once(base_url, api_key, model, messages)
        return 1.0

    [row] = played(agent)
    assert (found, row.turns) == ([param], 1)


def test_another_model_than_the_policy_does_not_exist(played):
    found = []

    def agent(base_url, api_key, model, messages):
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o': this server has 'addition'") as raised:
            asks_once(base_url, api_key, "gpt-4o", messages)
        found.append((raised.value.param, raised.value.code))
        asks_once(base_url, api_key, model, messages)
        return 1.0

    [row] = played(agent)
    assert (found, row.turns) == ([("model", "model_not_found")], 1)


def test_limits_of_turns_and_tokens_end_the_rollout_as_truncated(played):
    def agent(base_url, api_key, model, messages):
        for _ in range(2):
            asks_once(base_url, api_key, model, messages)
        with pytest.raises(openai.BadRequestError, match="already used all 2 turns"):
            asks_once(base_url, api_key, model, messages)
        return 1.0

    def long(base_url, api_key, model, messages):
        asks_once(base_url, api_key, model, messages)
        with pytest.raises(openai.BadRequestError, match="leaves no space for an answer within 48") as raised:
            asks_once(base_url, api_key, model, [{"role": "user", "content": "1" * LENGTH}])
        assert raised.value.code == "context_length_exceeded"
        return 1.0

    for each in (agent, long):
        [row] = played(each, max_turns=2)
        assert (row.truncated, row.scored) == (True, True), row.failure


def test_new_tokens_are_limited_by_the_request(played):
    def agent(base_url, api_key, model, messages):
        create = client_of(base_url, api_key).chat.completions.create
        assert create(model=model, messages=messages, max_tokens=1).choices[0].finish_reason == "length"
        create(model=model, messages=messages, max_completion_tokens=4000)
        return 1.0

    [row] = played(agent)
    lengths = [len(message["token_ids"]) for message in row.sampled_messages]
    assert lengths[0] == 1
    assert lengths[1] <= 4


def test_an_error_of_the_engine_ends_the_run_although_the_agent_handles_it(played, sampler):
    def agent(base_url, api_key, model, messages):
        sampler.broken = True
        with pytest.raises(openai.InternalServerError):
            asks_once(base_url, api_key, model, messages)
        return 1.0

    with pytest.raises(RLCoreError, match="the engine is broken"):
        played(agent)


def test_conversations_side_by_side_are_segments_of_one_rollout(played, sampler):
    def agent(base_url, api_key, model, messages):
        client = client_of(base_url, api_key)
        one, other = list(messages), [{"role": "user", "content": "9*9="}]
        for history in (one, other, one, other):
            answer = client.chat.completions.create(model=model, messages=history).choices[0].message
            history += [answer, {"role": "user", "content": "+1="}]
        return 1.0

    [row] = played(agent)
    batch = assert_recorded([row], sampler.log)
    assert [sorted({*turns.tolist()} - {0}) for turns in batch["token_turns"]] == [[1, 3], [2, 4]]
    assert [message["role"] for message in row.conversation()] == ["user", "assistant"] * 2


def test_an_agent_that_requires_other_arguments_is_refused(endpoint, tokenizer):
    options = {
        "model": "m",
        "limits": SessionLimits(max_turns=1, max_total_length=8, max_new_tokens=1),
        "timeout_s": 1.0,
        "task_name": "t",
        "returns_reward": True,
    }
    with pytest.raises(ConfigError, match=r"env\.t\.agent requires the argument 'prompt'\. An agent is called with keywords"):
        AgentDriver(lambda prompt, base_url: 0.0, endpoint, tokenizer, **options)
    with pytest.raises(ConfigError, match=r"env\.t\.agent is a int, not a function"):
        AgentDriver(3, endpoint, tokenizer, **options)


def test_control_tokens_in_the_messages_of_an_agent_are_text_also_after_sampled_tokens(played, sampler, tokenizer):
    def agent(base_url, api_key, model, messages):
        client = client_of(base_url, api_key)
        history = [{"role": "user", "content": "1+<eos>1="}]
        answer = client.chat.completions.create(model=model, messages=history).choices[0].message
        history += [answer, {"role": "user", "content": "<eos>+2="}]
        client.chat.completions.create(model=model, messages=history)
        return 1.0

    [row] = played(agent)
    assert_recorded([row], sampler.log)
    assert len(row.segments) == 1
    read = torch.cat([message["token_ids"] for message in row.message_log if "turn" not in message]).tolist()
    ended = row.sampled_messages[0]["token_ids"].tolist().count(tokenizer.eos_token_id)
    assert read.count(tokenizer.eos_token_id) == 1 - ended  # the template closes an answer that has no end token
