"""Two buffers that alternate, so that one bucket is written while the previous one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rl_core.weights.cuda_ipc import GpuBuffer
from rl_core.weights.shared_memory import Segment

BufferT = TypeVar("BufferT", Segment, GpuBuffer)


class BufferPair(Generic[BufferT]):
    """Two buffers, each replaced by a larger one when needed; `allocate` returns one of a size in bytes."""

    def __init__(self, allocate: Callable[[int], BufferT]) -> None:
        self._allocate: Callable[[int], BufferT] = allocate
        self._buffers: list[BufferT | None] = [None, None]
        self._turn = 0

    def next(self, size: int) -> BufferT:
        """The next buffer, with space for `size` bytes; its previous bucket is lost."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.size < size:
            if buffer is not None:
                buffer.close()
            self._buffers[self._turn] = buffer = self._allocate(size)
        return buffer

    def keep(self, most_bytes: int) -> None:
        """Keep buffers of up to `most_bytes` for the next refit, which uses them in the same order; free larger ones."""
        self._turn = 0
        for turn, buffer in enumerate(self._buffers):
            if buffer is not None and buffer.size > most_bytes:
                buffer.close()
                self._buffers[turn] = None

    def close(self) -> None:
        """Free both; calling it twice is fine."""
        self.keep(-1)
