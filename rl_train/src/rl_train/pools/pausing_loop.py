"""An event loop that pauses for blocking calls, so that code of users never runs inside of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class PausingLoop(asyncio.SelectorEventLoop):
    """An event loop that pauses for calls of `while_paused`.

    They run in its thread, one after the other, but without a running event loop. So code of users may start one
    (`asyncio.run`), and finds the thread that it would find without rollouts: timeouts by signals work in the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_stopped = False
        self._held_s = 0.0

    def hold(self, until: Event) -> None:
        """Do nothing until an event is set; callbacks and timeouts wait as if no time passed."""
        began = super().time()
        until.wait()
        self._held_s += super().time() - began

    def time(self) -> float:
        """Seconds of a monotonic clock that stands still while the loop is held."""
        return super().time() - self._held_s

    def pause_for(self, call: Callable[[], object]) -> None:
        """Run a call after the current iteration, with the caller's context variables."""
        self._calls.append(partial(copy_context().run, call))
        super().stop()

    def stop(self) -> None:
        self._is_stopped = True
        super().stop()

    def run_forever(self) -> None:
        is_stopped = False
        while not is_stopped:
            super().run_forever()
            while self._calls:
                self._calls.popleft()()
            is_stopped, self._is_stopped = self._is_stopped, False


def while_paused(function: Callable[..., ResultT], *args: Any) -> Future[ResultT]:
    """Run a blocking call, at once or, in an event loop that can pause, after this function has returned."""
    future: Future[ResultT] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*args))
        except (Exception, asyncio.CancelledError) as error:
            future.set_exception(error)

    loop = running_loop()
    if isinstance(loop, PausingLoop):
        loop.pause_for(run)
    else:
        run()
    return future


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
