"""Rollouts run concurrently: none waits for the turns of others, and the order in which they end changes nothing."""

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.pools.pool import ActorKey, InProcessPool, Pool
from rl_train.rollouts import collect
from rl_train.rollouts.collect import Collector, RolloutLoop
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch

WAIT_S = 60.0
"""Only reached if a test fails."""


@pytest.fixture
def streaming(engine_for):
    """A scripted engine that samples rows one by one; row n yields to the event loop `delays[n]` times."""

    def make(script, delays=(0,), **options):
        engine = engine_for(script, **options)

        class Streaming(type(engine)):
            sampled = 0
            cancelled = 0
            closed = ()

            def close_sessions(self, sessions):
                self.closed += tuple(sessions)

            async def generate_async(self, data, greedy=False):
                assert data.size == 1
                assert data["session_ids"][0] not in self.closed
                number, self.sampled = self.sampled, self.sampled + 1
                try:
                    for _ in range(delays[number % len(delays)]):
                        await asyncio.sleep(0)
                    yield 0, self.generate(data, greedy)
                except (GeneratorExit, asyncio.CancelledError):
                    self.cancelled += 1
                    raise

        engine.__class__ = Streaming
        return engine

    return make


def rows_of(tokenizer, tasks, group=1):
    return [
        Trajectory(
            message_log=[
                {
                    "role": "user",
                    "content": f"q{number}",
                    "token_ids": torch.tensor(tokenizer(f"<u>q{number}\n<a>")["input_ids"]),
                }
            ],
            metadata=dict(metadata),
            task_name=task,
            group_id=number,
            index=number,
            ordinal=number,
            sample=sample,
        )
        for number, (task, metadata) in enumerate(tasks)
        for sample in range(group)
    ]


def collector(engine, environments, tokenizer, turns=4):
    return Collector(
        generation=engine,
        environments=environments,
        tokenizer=tokenizer,
        seed=7,
        max_turns=dict.fromkeys(environments, turns),
        max_total_length=200,
    )


def play(engine, environments, tokenizer, rows, turns=4):
    collector(engine, environments, tokenizer, turns).collect(rows, stream=SampleStream.TRAINING)
    return rows


class Gated(EnvironmentInterface):
    """Rows of three turns; the first call of the slow row ends once all others have ended."""

    def __init__(self):
        self.others_ended = threading.Semaphore(0)
        self.waited = []

    def step(self, message_log_batch, metadata):
        [state] = metadata
        turn = state["turn"] + 1
        if state["slow"] and turn == 1:
            self.waited = [self.others_ended.acquire(timeout=WAIT_S) for _ in range(state["slow"])]
        elif not state["slow"] and turn == 3:
            self.others_ended.release()
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "go"}],
            metadata=[{**state, "turn": turn}],
            next_stop_strings=[None],
            rewards=torch.ones(1),
            terminateds=torch.tensor([turn == 3]),
        )


def test_a_slow_environment_call_delays_no_other_row(tokenizer, streaming):
    pool = InProcessPool(Gated, max_concurrency=2)
    environment = EnvironmentPool(pool, task_name="gated")
    tasks = [("gated", {"slow": 7, "turn": 0}), *[("gated", {"slow": 0, "turn": 0})] * 7]
    rows = play(streaming(lambda _: ("ok[EOS]", False)), {"gated": environment}, tokenizer, rows_of(tokenizer, tasks))
    assert pool._group.worker.waited == [True] * 7
    assert [row.turns for row in rows] == [3] * 8
    environment.shutdown()


TASKS = [("judge", {"expected": "yes"}), ("count", {"turns": 3}), ("count", {"turns": 1}), ("judge", {"expected": "no"})]


@settings(max_examples=25, deadline=None)
@given(delays=st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_the_order_in_which_rows_are_sampled_does_not_change_the_batch(tokenizer, engine_for, streaming, environments, delays):
    def script(text):
        return ("yes[EOS]" if len(text) % 2 else "no", False)

    expected = to_batch(play(engine_for(script), environments, tokenizer, rows_of(tokenizer, TASKS, group=2)))
    found = to_batch(play(streaming(script, delays), environments, tokenizer, rows_of(tokenizer, TASKS, group=2)))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(found[key], values), key
        elif key != "message_log":
            assert found[key] == values, key


class RecordingPool(Pool):
    """Two workers that record the number of rows in each call."""

    num_actors = 2
    max_concurrency = 1
    actors = (ActorKey(0, 0), ActorKey(1, 1))

    def __init__(self, environment):
        self.environment, self.calls = environment, []

    def submit(self, method, *args, **options):
        self.calls.append(len(args[1]))
        future = Future()
        future.set_result(getattr(self.environment, method)(*args))
        return future

    def map(self, method, calls, *, deadline_s=None): ...

    def shutdown(self): ...


def test_rows_that_are_ready_together_are_divided_among_the_workers(tokenizer, engine_for, environments):
    pool = RecordingPool(environments["count"])
    environment = EnvironmentPool(pool, task_name="count")
    tasks = [("count", {"turns": 2})] * 5 + [("count", {"turns": 1})] * 2
    play(engine_for(lambda _: ("ok[EOS]", False)), {"count": environment}, tokenizer, rows_of(tokenizer, tasks))
    assert pool.calls == [4, 3, 3, 2]


def test_an_error_of_the_engine_ends_the_other_rollouts_and_is_raised_as_it_is(tokenizer, streaming, environments):
    def script(text):
        if "q2" in text:
            raise RLCoreError("the engine is broken")
        return "ok[EOS]", False

    engine = streaming(script, delays=[500, 500, 3, 500])
    with pytest.raises(RLCoreError, match=r"^the engine is broken$"):
        play(engine, environments, tokenizer, rows_of(tokenizer, TASKS))
    assert engine.cancelled == 3
    assert len(set(engine.closed)) == 4


def test_rollouts_can_be_collected_where_an_event_loop_runs(tokenizer, streaming, environments):
    async def notebook_cell():
        return play(streaming(lambda _: ("yes[EOS]", False)), environments, tokenizer, rows_of(tokenizer, TASKS))

    assert [row.turns for row in asyncio.run(notebook_cell())] == [1, 3, 1, 1]


@pytest.mark.parametrize("threaded", [False, True])
def test_engines_and_environments_may_start_event_loops(tokenizer, engine_for, environments, threaded):
    threads = set()

    class Asking(type(environments["count"])):
        def step(self, message_log_batch, metadata):
            threads.add(threading.current_thread())
            return asyncio.run(asyncio.sleep(0, super().step(message_log_batch, metadata)))

    def script(text):
        threads.add(threading.current_thread())
        return asyncio.run(asyncio.sleep(0, ("ok[EOS]", False)))

    rows = rows_of(tokenizer, [("count", {"turns": 2})] * 3)
    played = replace(collector(engine_for(script), {"count": Asking()}, tokenizer), loop=RolloutLoop(threaded=threaded))
    played.collect(rows, stream=SampleStream.TRAINING)
    played.loop.close()
    assert [row.turns for row in rows] == [2, 2, 2]
    assert len(threads) == 1
    assert (threads == {threading.current_thread()}) is not threaded


def test_rollouts_of_one_turn_are_sampled_in_one_call(tokenizer, streaming, environments):
    engine = streaming(lambda _: ("ok[EOS]", False))
    play(engine, environments, tokenizer, rows_of(tokenizer, TASKS), turns=1)
    assert [len(call["texts"]) for call in engine.asked] == [4]


def test_the_turns_of_a_rollout_are_a_session_of_the_engine_that_is_closed_when_it_ends(tokenizer, streaming, environments):
    engine = streaming(lambda _: ("yes[EOS]", False))
    sampled, closed = [], []

    class Watched(type(engine)):
        async def generate_async(self, data, greedy=False):
            [session] = data["session_ids"]
            assert session not in closed
            sampled.append(session)
            async for item in super().generate_async(data, greedy):
                yield item

        def close_sessions(self, sessions):
            closed.extend(sessions)

    engine.__class__ = Watched
    for _ in range(2):
        play(engine, environments, tokenizer, rows_of(tokenizer, TASKS))
    assert sorted(map(sampled.count, set(sampled))) == [1, 1, 1, 1, 1, 1, 3, 3]
    assert sorted(closed) == sorted(set(sampled))


def test_an_engine_that_samples_only_complete_batches_is_logged_once(tokenizer, engine_for, environments, caplog):
    collect._log_batches.cache_clear()
    engine = engine_for(lambda _: ("ok[EOS]", False))
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        for _ in range(2):
            play(engine, environments, tokenizer, rows_of(tokenizer, TASKS))
        play(engine, environments, tokenizer, rows_of(tokenizer, TASKS), turns=1)
    assert [record.message for record in caplog.records if "complete batches only" in record.message] == [
        "ScriptedEngine samples complete batches only (it has no `generate_async`), so each turn starts when all rollouts have "
        "ended the previous one: a slow environment call delays every rollout."
    ]
    assert [len(call["texts"]) for call in engine.asked] == [4, 1, 1, 4, 1, 1, 4]
