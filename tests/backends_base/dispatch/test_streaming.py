"""Streaming rows over workers: balanced by rows in flight, returned when finished, cancelled with their consumer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))
import streaming_workers
from streaming_workers import DIES, FAILS, FOREVER, IS_BAD, SLEEPS, TICK_S, TickingWorker

from rl_backends_base.streaming import RowStream
from rl_core.cluster import RayVirtualCluster, RayWorkerGroup
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, DeadlineExceededError, UserError, WorkerDiedError, WorkerError

cloudpickle.register_pickle_by_value(streaming_workers)


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as made:
        yield made


@pytest.fixture(scope="module")
def pair(cluster):
    """Two Ray workers; a test that kills one restarts it."""
    with RayWorkerGroup(cluster, TickingWorker) as group:
        yield group


@pytest.fixture
def alone():
    with InProcessWorkerGroup(TickingWorker) as group:
        yield group


@pytest.fixture(params=["in this process", pytest.param("over Ray", marks=pytest.mark.ray)])
def group(request):
    return request.getfixturevalue("alone" if request.param == "in this process" else "pair")


_prompts = itertools.count()


def rows(*ticks, first=3, prompt=None, sessions=None):
    """Rows with different prompts, or all with the same one."""
    second = [next(_prompts) if prompt is None else prompt for _ in ticks]
    batch = BatchedDataDict(
        input_ids=torch.tensor([[first, number] for number in second]),
        input_lengths=torch.tensor(ticks),
        marks=[str(n) for n in ticks],
    )
    if sessions is not None:
        batch["session_ids"] = sessions
    return batch


class NoRestarts:
    """Restarts no replica: the rows of a dead one fail."""

    def restarts_of(self, rank):
        return 0

    def lacks_weights(self, rank):
        return False

    def recover(self, rank, cause, restarts_before):
        raise cause


def stream_of(group, deadline_s=120.0):
    return RowStream(group, deadline_s=deadline_s, recovery=NoRestarts())


async def collected(stream, batch):
    return [row async for row, _ in stream.rows(batch, greedy=False)]


def in_flight(group):
    return [names for names in group.run_all("in_flight") if names]


async def asked(stream, batch):
    """A task that collects the rows, which are in flight."""
    before = sum(stream._affinity.load)
    task = asyncio.create_task(collected(stream, batch))
    await asyncio.sleep(0)  # its first step hands all of them out
    assert sum(stream._affinity.load) == before + batch.size
    return task


async def called_off(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_rows_come_as_they_end_each_once(group):
    order = asyncio.run(collected(stream_of(group), rows(30, 2, 12)))
    assert sorted(order) == [0, 1, 2]
    # Over Ray the second row has another worker, and either clock may be ahead.
    assert [row for row in order if row != 1] == [2, 0]
    assert group.world_size > 1 or order == [1, 2, 0]


def test_rows_that_stream_come_while_they_are_in_flight_and_once_when_they_end(group):
    stream = stream_of(group)
    batch = BatchedDataDict({**rows(30, 30), "stream_tokens": torch.tensor([True, False])})

    async def outputs():
        return [(row, "unfinished" in output, stream._affinity.load) async for row, output in stream.rows(batch, greedy=False)]

    found = asyncio.run(outputs())
    assert [unfinished for row, unfinished, _ in found if row == 1] == [False]
    *before, last = [unfinished for row, unfinished, _ in found if row == 0]
    assert before, "30 ticks are longer than a poll"
    assert all(before)
    assert not last
    assert sum(found[-1][2]) == 0


def test_each_row_goes_to_the_replica_with_the_fewest_in_flight(pair):
    stream = stream_of(pair)

    async def spread():
        long = await asked(stream, rows(FOREVER))
        assert stream._affinity.load == [1, 0]
        ranks = {row: int(output["rank"]) async for row, output in stream.rows(rows(4, 5, 6), greedy=False)}
        assert stream._affinity.load == [1, 0]
        await called_off(long)
        return ranks

    # The worker with the long row has one; the first goes to the idle one, and so on in turn.
    assert asyncio.run(spread()) == {0: 1, 1: 0, 2: 1}
    assert stream._affinity.load == [0, 0]


async def ranks_of(stream, batch):
    return [int(output["rank"]) async for _, output in stream.rows(batch, greedy=False)]


@pytest.mark.ray
def test_rows_of_one_prompt_share_a_replica(pair):
    stream = stream_of(pair)

    async def ask():
        busy = await asked(stream, rows(FOREVER))  # on rank 0
        group = [asyncio.create_task(ranks_of(stream, rows(20, prompt=-1))) for _ in range(4)]
        await asyncio.sleep(0)
        assert stream._affinity.load == [1, 4]
        assert await ranks_of(stream, rows(4)) == [0]
        found = await asyncio.gather(*group)
        await called_off(busy)
        return found

    assert asyncio.run(ask()) == [[1]] * 4


@pytest.mark.ray
def test_turns_of_a_session_share_a_replica_until_it_is_closed(pair):
    stream = stream_of(pair)

    async def ask():
        busy = await asked(stream, rows(FOREVER))  # on rank 0
        first = await ranks_of(stream, rows(2, sessions=["a"]))
        await called_off(busy)
        second = await ranks_of(stream, rows(2, sessions=["a"]))
        stream.close_sessions(["a", "unknown"])
        return first, second, await ranks_of(stream, rows(2, sessions=["a"]))

    assert asyncio.run(ask()) == ([1], [1], [0])
    assert pair.run_all("closed_sessions") == [[], ["a"]]


def test_rows_that_arrive_later_join_those_in_flight(group):
    stream = stream_of(group)

    async def both():
        first = await asked(stream, rows(FOREVER, FOREVER))
        while sum(map(len, in_flight(group))) < 2:
            await asyncio.sleep(0.001)
        assert sorted(await collected(stream, rows(2, 2))) == [0, 1]
        await called_off(first)

    asyncio.run(both())


async def by_break(stream):
    async for _ in stream.rows(rows(1, FOREVER, FOREVER), greedy=False):
        break


async def by_close(stream):
    iterator = stream.rows(rows(1, FOREVER, FOREVER), greedy=False)
    await anext(iterator)
    await iterator.aclose()
    assert stream._affinity.load == [0] * len(stream._affinity.load)


async def by_error(stream):
    with contextlib.suppress(ZeroDivisionError):
        async for _ in stream.rows(rows(1, FOREVER, FOREVER), greedy=False):
            raise ZeroDivisionError


async def by_cancelled_task(stream):
    await called_off(await asked(stream, rows(FOREVER, FOREVER, FOREVER)))


async def by_timeout(stream):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collected(stream, rows(FOREVER, FOREVER)), timeout=0.2)


@pytest.mark.parametrize("leave", [by_break, by_close, by_error, by_cancelled_task, by_timeout])
def test_leaving_the_iterator_cancels_unfinished_rows_on_the_workers(group, leave):
    stream = stream_of(group)
    asyncio.run(leave(stream))
    assert stream._affinity.load == [0] * group.world_size
    assert in_flight(group) == []
    assert sorted(asyncio.run(collected(stream, rows(3, 2)))) == [0, 1]


def test_a_consumer_that_leaves_does_not_affect_other_consumers(group):
    stream = stream_of(group)

    async def both():
        stays = await asked(stream, rows(20, 8, 14))
        for _ in range(6):
            goes = asyncio.create_task(collected(stream, rows(FOREVER, FOREVER)))
            await asyncio.sleep(0.02)
            await called_off(goes)
        return await stays

    assert sorted(asyncio.run(both())) == [0, 1, 2]
    assert in_flight(group) == []


def test_rows_that_are_cancelled_before_they_were_sent_never_arrive(alone):
    async def leave_at_once(stream):
        step = anext(stream.rows(rows(1), greedy=False))
        step.send(None)
        with pytest.raises(asyncio.CancelledError):
            step.throw(asyncio.CancelledError())
        await asyncio.sleep(0.05)

    asyncio.run(leave_at_once(stream_of(alone)))
    assert alone.run_all("number_of_calls") == [0]


def test_an_idle_stream_does_not_call_its_workers(group):
    async def then_idle(stream):
        await collected(stream, rows(2))
        before = group.run_all("number_of_calls")
        await asyncio.sleep(0.3)
        return before == group.run_all("number_of_calls")

    assert asyncio.run(then_idle(stream_of(group)))


def test_the_error_of_a_bad_row_is_raised_only_to_its_consumer(group):
    stream = stream_of(group)

    async def both():
        good = await asked(stream, rows(40, 41))
        with pytest.raises(DataError, match="this row is bad"):
            await collected(stream, rows(300, 1, first=IS_BAD))
        return await good

    assert sorted(asyncio.run(both())) == [0, 1]
    assert in_flight(group) == []


def test_a_worker_that_fails_fails_its_consumers_and_forgets_their_rows(group):
    stream = stream_of(group)

    async def both():
        # As many rows as workers, so that every worker has one of each call.
        innocent = await asked(stream, rows(*[FOREVER] * group.world_size))
        with pytest.raises(WorkerError, match=r"poll(.|\n)*this worker fails"):
            await collected(stream, rows(1, first=FAILS))
        with pytest.raises(WorkerError, match="this worker fails"):
            await innocent

    asyncio.run(both())
    assert in_flight(group) == []
    assert asyncio.run(collected(stream, rows(2))) == [0]


@pytest.mark.ray
def test_a_worker_that_dies_ends_the_wait_of_its_consumers_and_of_no_other(pair):
    stream = stream_of(pair)

    async def die():
        living = await asked(stream, rows(FOREVER))  # on rank 0
        with pytest.raises(WorkerDiedError, match="rank 1"):
            await collected(stream, rows(1, first=DIES))
        assert sorted(await collected(stream, rows(2, 2))) == [0, 1], "later rows use the other replica"
        assert not living.done()
        pair.run_one("end_all")
        return await living

    assert asyncio.run(die()) == [0]
    pair.restart(1)
    assert sorted(asyncio.run(collected(stream, rows(2, 2)))) == [0, 1]


@pytest.mark.ray
def test_an_unresponsive_worker_is_named_after_the_deadline(pair):
    with pytest.raises(DeadlineExceededError, match="rank 0"):
        asyncio.run(collected(stream_of(pair, deadline_s=0.5), rows(1, first=SLEEPS)))
    pair.restart(0)


def test_a_worker_that_finishes_no_row_fails_after_the_deadline(alone):
    class TickingLoop(asyncio.SelectorEventLoop):
        """A loop whose clock is the progress of the worker, so that results do not depend on the load of the machine."""

        def time(self):
            return alone.worker.ticks * TICK_S

    def run(coroutine):
        with asyncio.Runner(loop_factory=TickingLoop) as runner:
            return runner.run(coroutine)

    stream = stream_of(alone, deadline_s=0.4)
    # The error names the replica and the setting.
    with pytest.raises(DeadlineExceededError, match=r"rank 0 .*none of its 1 rows for 0\.4 s.*generate_s"):
        run(collected(stream, rows(FOREVER)))
    assert in_flight(alone) == []
    # The clock restarts with the next row.
    assert run(collected(stream, rows(30))) == [0]


def test_rows_of_a_closed_event_loop_are_cancelled_by_the_next_call(alone):
    stream = stream_of(alone)
    loop = asyncio.new_event_loop()
    iterator = stream.rows(rows(1, FOREVER), greedy=False)
    loop.run_until_complete(anext(iterator))
    loop.close()
    assert len(in_flight(alone)) == 1
    assert asyncio.run(collected(stream, rows(2))) == [0]
    assert in_flight(alone) == []


def test_two_event_loops_at_once_are_refused(alone):
    stream = stream_of(alone)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    task = asyncio.run_coroutine_threadsafe(asked(stream, rows(FOREVER)), loop).result()
    try:
        with pytest.raises(UserError, match="another event loop"):
            asyncio.run(collected(stream, rows(1)))
    finally:
        asyncio.run_coroutine_threadsafe(called_off(task), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_empty_batch_makes_no_calls(alone):
    assert asyncio.run(collected(stream_of(alone), rows(1).slice(0, 0))) == []
    assert alone.run_all("number_of_calls") == [0]
