"""The event loop of rollouts: how an interruption ends it."""

import asyncio
import gc
import signal

import pytest

from rl_train.rollouts.loop import RolloutLoop


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
