"""The thread that runs the engine: batches of several requests, cancellation, and its end."""

import asyncio
import json
import threading

import pytest
from starlette.testclient import TestClient

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, to_output
from rl_core.errors import BrokenPromiseError, NotSupportedError, WorkerError
from rl_serve.engine import EngineClosedError, EngineThread, SamplingRow
from rl_serve.sampling import Limits
from rl_serve.serving import create_app

ROWS = [SamplingRow(prompt=[4, 13, 5, 16], seed=seed, max_new_tokens=4) for seed in range(3)]


class BatchesOnly:
    """The Transformers engine without `generate_async`; counts its calls and can hold the first one back."""

    streams_tokens = False

    def __init__(self, generation):
        self._generation = generation
        self.sizes = []
        self.started, self.go_on = threading.Event(), threading.Event()

    def prepare_for_generation(self):
        return True

    def generate_async(self, data, greedy=False):
        raise NotSupportedError("whole batches only")

    def generate(self, data, greedy=False):
        self.sizes.append((data.size, greedy))
        self.started.set()
        assert self.go_on.wait(60)
        return self._generation.generate(data, greedy)


async def all_of(engine, rows, *, greedy=False):
    return {index: row async for index, row in engine.sample(rows, greedy=greedy)}


def test_requests_that_wait_for_an_engine_of_whole_batches_form_the_next_batch(model, engine):
    expected = asyncio.run(all_of(engine, ROWS))
    batches = BatchesOnly(model.generation)
    thread = EngineThread(batches)

    async def scenario():
        first = asyncio.create_task(all_of(thread, ROWS[:1]))
        await asyncio.to_thread(batches.started.wait, 60)
        others = [asyncio.create_task(all_of(thread, [row])) for row in ROWS[1:]]
        greedy = asyncio.create_task(all_of(thread, ROWS[:1], greedy=True))
        while len(thread._batches._waiting) < 3:
            await asyncio.sleep(0.01)
        batches.go_on.set()
        return [await first, *[await other for other in others]], await greedy

    rows, _ = asyncio.run(scenario())
    thread.close()
    assert batches.sizes == [(1, False), (2, False), (1, True)]
    assert [row[0].token_ids for row in rows] == [expected[index].token_ids for index in range(3)]


class Forgetful(BatchesOnly):
    """Returns one row too few."""

    def generate(self, data, greedy=False):
        output = super().generate(data, greedy)
        return output.select_indices(range(data.size - 1))


@pytest.mark.slow
def test_an_output_without_all_rows_fails_all_waiting_requests_and_later_ones_are_answered(model):
    batches = Forgetful(model.generation)
    batches.go_on.set()
    thread = EngineThread(batches)

    async def scenario():
        found = asyncio.gather(*[all_of(thread, [row]) for row in ROWS], all_of(thread, ROWS), return_exceptions=True)
        return await asyncio.wait_for(found, 60)

    failures = asyncio.run(scenario())
    assert [type(failure) for failure in failures] == [BrokenPromiseError] * 4
    assert "for a call with" in str(failures[0])
    batches.generate = model.generation.generate
    assert len(asyncio.run(all_of(thread, ROWS))) == 3
    thread.close()


class Endless:
    """An engine whose rows end only when they are cancelled."""

    streams_tokens = True

    def __init__(self):
        self.entered, self.cancelled = threading.Event(), threading.Event()

    def prepare_for_generation(self):
        return True

    async def generate_async(self, data, greedy=False):
        self.entered.set()
        try:
            await asyncio.sleep(3600)
            yield
        finally:
            self.cancelled.set()


def test_closing_the_iterator_cancels_the_rows_in_the_engine():
    engine = Endless()
    thread = EngineThread(engine)

    async def scenario():
        task = asyncio.create_task(all_of(thread, ROWS))
        await asyncio.to_thread(engine.entered.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert engine.cancelled.wait(60)
    thread.close()


def test_a_closed_engine_rejects_rows(model):
    thread = EngineThread(model.generation)
    thread.close()
    thread.close()
    with pytest.raises(EngineClosedError, match="the engine was shut down"):
        asyncio.run(all_of(thread, ROWS))


def test_rows_in_progress_fail_when_the_engine_is_closed():
    engine = Endless()
    thread = EngineThread(engine)

    async def scenario():
        task = asyncio.create_task(all_of(thread, ROWS))
        await asyncio.to_thread(engine.entered.wait, 60)
        await asyncio.to_thread(thread.close)
        with pytest.raises(EngineClosedError, match="the engine was shut down"):
            await task

    asyncio.run(scenario())


class Failing:
    """An engine that reports why its second row could not be sampled, as `OpenAIGeneration` does."""

    streams_tokens = False

    def prepare_for_generation(self):
        return True

    async def generate_async(self, data, greedy=False):
        for row in range(data.size):
            prompt = data["input_ids"][row].tolist()
            tokens = [] if row == 1 else [5]
            completion = Completion(
                prompt=prompt, tokens=tokens, logprobs=[-1.0] * len(tokens), truncated=False, weight_version=0
            )
            reason = {"failures": ["status 503: overloaded"]} if row == 1 else {}
            yield row, BatchedDataDict({**to_output([completion]), **reason})


class FailingBatches(BatchesOnly):
    """The same for an engine that samples whole batches."""

    def generate(self, data, greedy=False):
        output = self._generation.generate(data, greedy)
        output["failures"] = [None, "status 503: overloaded", None][: data.size]
        return output


@pytest.mark.parametrize("whole_batches", [False, True])
def test_a_row_that_could_not_be_sampled_is_an_error_instead_of_an_empty_completion(model, whole_batches):
    thread = EngineThread(FailingBatches(model.generation) if whole_batches else Failing())
    with pytest.raises(WorkerError, match="status 503: overloaded"):
        asyncio.run(all_of(thread, ROWS))
    assert asyncio.run(all_of(thread, ROWS[:1]))[0].token_ids
    with TestClient(create_app(model, thread, limits=Limits())) as client:
        response = client.post("/v1/completions", json={"prompt": "1+1=", "n": 3})
    assert (response.status_code, "choices" in response.json()) == (503, False)
    thread.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_rows(model, stream):
    engine = Endless()
    thread = EngineThread(engine)
    app = create_app(model, thread, limits=Limits())
    body = json.dumps({"prompt": "1", "stream": stream}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": body}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.to_thread(engine.entered.wait, 60)
        return {"type": "http.disconnect"}

    async def send(message):
        return None

    asyncio.run(app(scope, receive, send))
    assert engine.cancelled.wait(60)
    thread.close()
