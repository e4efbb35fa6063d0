"""Threads for work whose time grows with the text of a request, so that the event loop answers other clients meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rl_core.event_loop import in_thread

_THREADS = 32
"""More than a machine needs for throughput, so that short texts do not wait for the long texts of other requests."""
ResultT = TypeVar("ResultT")


class TokenizerThreads:
    """Tokenizes and decodes in separate threads, because those of asyncio may all wait for code in the sandbox.

    Tokenizers of the library `tokenizers` release the interpreter's lock while they work.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call a function in a thread; it also finishes if the caller is cancelled.

        Raises:
            Exception: whatever the function raises.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-serve-text")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def close(self) -> None:
        """Wait for the running calls, cancel the others, and end the threads; a later `run` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await in_thread(partial(pool.shutdown, cancel_futures=True), name="rl-serve-close")
