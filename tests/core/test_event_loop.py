"""Blocking calls of coroutines: a future always ends, whatever the call raises."""

import asyncio
from contextvars import ContextVar
from threading import Event, current_thread

import pytest

from rl_core.event_loop import finished, in_thread

_ROW: ContextVar[str] = ContextVar("row", default="")


def test_a_blocking_call_runs_in_a_named_daemon_thread_with_the_context_of_its_caller():
    async def main():
        _ROW.set("row 3")
        return await in_thread(lambda: (_ROW.get(), current_thread().name, current_thread().daemon), name="agent")

    assert asyncio.run(main()) == ("row 3", "agent", True)


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (ValueError("no"), ValueError, "no"),
        (SystemExit(3), RuntimeError, "SystemExit: 3"),
        (StopIteration("empty"), RuntimeError, "StopIteration: empty"),
    ],
    ids=["exception", "exit", "stop_iteration"],
)
def test_an_exception_of_a_blocking_call_is_raised_by_its_future(raised, expected, text):
    def call():
        raise raised

    async def main():
        await asyncio.wait_for(in_thread(call, name="agent"), 60.0)

    with pytest.raises(expected, match=f"^{text}$"):
        asyncio.run(main())


def test_a_call_that_ends_after_its_event_loop_changes_nothing():
    release, threads = Event(), []

    def call():
        threads.append(current_thread())
        release.wait()

    async def main():
        future = in_thread(call, name="agent")
        while not threads:
            await asyncio.sleep(0)
        future.cancel()

    asyncio.run(main())
    release.set()
    threads[0].join(60.0)
    assert not threads[0].is_alive()


def test_an_awaitable_is_finished_with_and_without_a_running_event_loop():
    async def row():
        await asyncio.sleep(0)
        return _ROW.get()

    async def notebook():
        _ROW.set("row 4")
        return finished(row())

    assert (finished(row()), finished("row 5"), asyncio.run(notebook())) == ("", "row 5", "row 4")
