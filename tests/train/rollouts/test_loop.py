"""The event loop of rollouts: it pauses for blocking calls, and how an interruption ends it."""

import asyncio
import gc
import signal
import threading
import time
from contextvars import ContextVar

import pytest

from rl_train.pools.pool import while_paused
from rl_train.rollouts.collect import RolloutLoop

ROW: ContextVar[str] = ContextVar("row", default="")


async def interrupted():
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGINT)


async def failing():
    raise ValueError("no reward")


class Waiting:
    """A rollout that waits until it is cancelled."""

    ended = False

    async def play(self):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended = True


def test_after_an_interruption_close_cancels_the_other_rollouts():
    loop, other = RolloutLoop(), Waiting()
    loop.start(other.play())
    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupted())
    loop.close()
    assert other.ended


def test_an_interruption_in_a_started_rollout_ends_the_wait_for_another():
    loop, other = RolloutLoop(), Waiting()
    loop.start(interrupted())
    with pytest.raises(KeyboardInterrupt):
        loop.run(other.play())
    loop.close()
    assert other.ended


@pytest.mark.parametrize(("background", "reports"), [(interrupted, 0), (failing, 1)])
def test_the_error_of_a_background_task_is_reported_unless_it_is_an_interruption(background, reports, caplog):
    loop = RolloutLoop()

    async def rollout():
        task = asyncio.create_task(background())
        await asyncio.wait([task])
        del task
        gc.collect()

    try:
        loop.run(rollout())
    except KeyboardInterrupt:
        assert background is interrupted
    loop.close()
    gc.collect()
    assert len([record for record in caplog.records if "never retrieved" in record.message]) == reports


@pytest.fixture(params=[False, True], ids=["main_thread", "own_thread"])
def loop(request):
    loop = RolloutLoop(threaded=request.param)
    yield loop
    loop.close()


def test_the_loop_pauses_for_calls_which_run_in_its_thread_in_order(loop):
    ran = []

    def call(name):
        ran.append((name, ROW.get(), threading.get_ident()))
        return asyncio.run(asyncio.sleep(0, name))

    async def rollout(name):
        ROW.set(name)
        returned = await asyncio.wrap_future(while_paused(call, name))
        again = await asyncio.wrap_future(while_paused(call, name.upper()))
        return returned, again, threading.get_ident()

    async def rollouts():
        return await asyncio.gather(*map(rollout, "abc"))

    ended = loop.run(rollouts())
    thread = ended[0][-1]
    assert ended == [(name, name.upper(), thread) for name in "abc"]
    assert ran == [(name, name.lower(), thread) for name in "abcABC"]


@pytest.mark.parametrize("raised", [ValueError("no"), asyncio.CancelledError()], ids=["error", "cancelled"])
def test_an_exception_of_a_call_reaches_only_its_rollout(loop, raised):
    def call():
        raise raised

    async def rollout():
        return await asyncio.wait([asyncio.wrap_future(while_paused(call)), asyncio.wrap_future(while_paused(len, "ab"))])

    done, _ = loop.run(rollout())
    assert sorted(str(future.result()) for future in done if not future.cancelled() and not future.exception()) == ["2"]


def test_a_cancelled_call_does_not_run(loop):
    ran = []

    async def rollout():
        while_paused(ran.append, 1).cancel()
        await asyncio.wrap_future(while_paused(ran.append, 2))

    loop.run(rollout())
    assert ran == [2]


def test_calls_of_cancelled_rollouts_run_before_the_loop_is_closed(loop):
    ended, started = [], threading.Event()

    async def rollout():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            while_paused(ended.append, "session")

    async def other():
        while not started.is_set():
            await asyncio.sleep(0)

    loop.start(rollout())
    loop.run(other())
    loop.close()
    assert ended == ["session"]


def test_an_interruption_of_a_call_ends_the_wait():
    loop, other = RolloutLoop(), Waiting()
    loop.start(other.play())

    async def rollout():
        await asyncio.wrap_future(while_paused(signal.raise_signal, signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        loop.run(rollout())
    loop.close()
    assert other.ended


def test_without_a_loop_that_can_pause_a_call_runs_at_once():
    async def notebook():
        return while_paused(len, "ab").result(timeout=0)

    assert asyncio.run(notebook()) == while_paused(len, "ab").result(timeout=0) == 2


class Ticking:
    """A rollout that counts its iterations, and notices whether its time limit has passed."""

    def __init__(self):
        self.ticks, self.is_late = 0, False

    async def play(self, limit_s):
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    self.ticks += 1
                    await asyncio.sleep(0.001)
        except TimeoutError:
            self.is_late = True


def settled(rollout):
    """The ticks of a rollout once they have stopped for 0.2 s; fails if they do not."""
    looks = [rollout.ticks]
    while len(set(looks[-10:])) > 1 or len(looks) < 10:
        assert len(looks) < 2000, "the rollout has continued"
        time.sleep(0.02)
        looks.append(rollout.ticks)
    return looks[-1]


def test_rollouts_that_take_turns_continue_only_while_a_thread_waits_and_their_time_stands_still():
    loop, rollout = RolloutLoop(threaded=True, takes_turns=True), Ticking()
    try:
        loop.start(rollout.play(limit_s=2.0))
        loop.run(asyncio.sleep(0.05))
        first = settled(rollout)
        assert first > 0
        time.sleep(2.1)  # longer than the rollout may take
        assert rollout.ticks == first
        loop.run(asyncio.sleep(0.05))
        assert rollout.ticks > first
        assert not rollout.is_late
    finally:
        loop.close()


@pytest.mark.parametrize("leaves", ["closed", "forgotten"])
def test_a_loop_that_is_held_ends_at_once(leaves):
    loop, rollout = RolloutLoop(threaded=True, takes_turns=True), Ticking()
    if leaves == "closed":
        loop.start(rollout.play(limit_s=60.0))
    loop.run(asyncio.sleep(0.01))
    settled(rollout)
    [thread] = loop._threads
    if leaves == "closed":
        loop.close()
    else:
        del loop
        gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()


def test_without_turns_rollouts_continue_meanwhile():
    loop, rollout = RolloutLoop(threaded=True), Ticking()
    try:
        loop.start(rollout.play(limit_s=60.0))
        loop.run(asyncio.sleep(0.01))
        before = rollout.ticks
        for _ in range(2000):
            if rollout.ticks > before:
                break
            time.sleep(0.02)
        assert rollout.ticks > before
    finally:
        loop.close()
