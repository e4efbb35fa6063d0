"""Runs coroutines for code that is not asynchronous itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


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
