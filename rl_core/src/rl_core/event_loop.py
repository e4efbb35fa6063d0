"""Runs coroutines for code that is not asynchronous itself, and blocking calls for code that is."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def in_thread(call: Callable[[], ResultT], *, name: str) -> asyncio.Future[ResultT]:
    """Run a blocking call in a new thread, with the caller's context variables; cancelling the future does not end the call.

    Unlike with `asyncio.to_thread`, neither the event loop nor the process waits at its end for a call that never returns.
    The future raises what the call raises, but a RuntimeError instead of exceptions that would end the event loop
    (SystemExit) or that a future cannot hold (StopIteration).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            result = call()
            outcome = partial(future.set_result, result)
        except BaseException as error:
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
    return future


def finished(value: Any) -> Any:
    """The result of an awaitable, which runs in a new event loop; any other value as it is."""
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with ThreadPoolExecutor(1) as thread:  # a thread has one running event loop, and that of a notebook runs already
        return thread.submit(copy_context().run, asyncio.run, awaited()).result()


class EventLoopThread:
    """An event loop in a separate, named thread, which runs until it is closed.

    HTTP clients are bound to the loop in which they are first used, so an object with such a client keeps its loop.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine; callable from any thread but this one."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine and wait for its result."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Stop the thread; calling it twice is fine."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
