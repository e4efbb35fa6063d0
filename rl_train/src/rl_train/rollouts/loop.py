"""The event loop of all rollouts of a run."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_train.pools.pausing_loop import PausingLoop, running_loop

ResultT = TypeVar("ResultT")
_log = logging.getLogger("rlcore")

_CHECK_S = 0.1
"""Interval in which a thread that waits for rollouts checks whether it must do something for them."""
_STOP_S = 10.0
"""Maximum time that cancelled coroutines may take to end."""


class RolloutLoop:
    """An event loop that keeps its rollouts from one call to the next, until it is closed.

    The loop runs in its own thread, so rollouts continue during training. For an engine that computes in the calling thread, it
    only runs while that thread waits.

    Args:
        threaded: whether it has its own thread. In a thread that runs an event loop itself, such as that of a notebook, it
            always has one.
        takes_turns: whether that thread also runs it only while another one waits, because engine and training would slow each
            other down on the cores that they share.
    """

    def __init__(self, *, threaded: bool = False, takes_turns: bool = False) -> None:
        self._threaded, self._takes_turns = threaded, takes_turns
        self._is_awaited = threading.Event()
        """Ends the pause between two turns."""
        self._loop = PausingLoop()
        self._loop.set_exception_handler(_report_unless_interrupted)
        self._threads: list[threading.Thread] = []
        """The loop's own thread, if it has one."""
        self._changed = threading.Condition()
        self.awaited_since: float | None = None
        """Since when a thread waits for rollouts, in seconds of `time.perf_counter`; None if none does."""
        self._close = weakref.finalize(self, _stop, self._loop, self._threads, self._is_awaited)

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine; without a thread, it runs during `wait`."""
        if not self._threads and (self._threaded or running_loop() is not None):
            self._threads.append(threading.Thread(target=self._loop.run_forever, name="rlcore-rollouts", daemon=True))
            self._threads[0].start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(self._notify)
        return future

    def wait(self, condition: Callable[[], bool], *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition holds, which is checked whenever a coroutine has ended.

        Args:
            condition: whether to return.
            meanwhile: called repeatedly in this thread, if the loop has its own.
        """
        self.awaited_since = time.perf_counter()
        self._is_awaited.set()
        try:
            while not condition():
                if not self._threads:
                    self._loop.run_forever()  # until `_notify`
                    continue
                meanwhile()
                with self._changed:
                    if not condition():
                        self._changed.wait(_CHECK_S)
        finally:
            self.awaited_since = None
            if self._takes_turns and self._threads and not self._loop.is_closed():
                self._is_awaited.clear()
                self._loop.call_soon_threadsafe(self._loop.hold, self._is_awaited)

    def run(self, coroutine: Coroutine[Any, Any, ResultT], *, meanwhile: Callable[[], None] = lambda: None) -> ResultT:
        """Run a coroutine to its end; arguments as `wait`."""
        future = self.start(coroutine)
        try:
            self.wait(future.done, meanwhile=meanwhile)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """Cancel all coroutines and stop the thread; calling it twice is fine."""
        self._is_awaited.set()
        if self._close.alive and self._threads:
            try:
                asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_STOP_S)
            except TimeoutError:
                _log.warning("Some rollouts did not stop within %g s after they were cancelled.", _STOP_S)
        elif self._close.alive:
            self._loop.run_until_complete(_cancel_all())
        self._close()

    def _notify(self, _: Future[Any]) -> None:
        if not self._threads and self.awaited_since is not None:  # after an interruption, it would end the loop of `close`
            self._loop.stop()
        with self._changed:
            self._changed.notify_all()


def _report_unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the error of a task, except an interruption, which also ended the loop."""
    if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
        loop.default_exception_handler(context)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _stop(loop: asyncio.AbstractEventLoop, threads: list[threading.Thread], is_awaited: threading.Event) -> None:
    is_awaited.set()
    for thread in threads:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_S)
    if not loop.is_running():
        loop.close()
