"""Rows of a streaming engine: they join while others run, are collected once each, cancelled, and held during a refit."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from rl_backends_hf.sampling.rows import Row
from rl_backends_hf.sampling.sampler import Sampler
from rl_backends_hf.sampling.session_cache import SessionCache
from rl_core.backend import return_freed_memory
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import to_output
from rl_core.errors import DataError, RLCoreError
from rl_core.interfaces.worker import GenerationRequest

_PAUSED_WAIT_S: Final = 0.01
"""Maximum duration of a poll while a refit has paused the rows; the next refit call must wait for it."""
PACKED_ROWS: Final = 16
"""Number of rows that packed weights are laid out for; the number that arrives is not known."""


class RowsInFlight:
    """Rows that were submitted and not collected yet. They compute only during `poll`.

    Weights must not change between polls, except between `pause` and `resume`.

    Args:
        sampler: how to sample.
        session_bytes: memory limit of keys and values kept for sessions between their turns.
    """

    def __init__(self, sampler: Sampler, *, session_bytes: int) -> None:
        self._sampler = sampler
        self._rows: dict[str, Row] = {}
        self._sessions = SessionCache(session_bytes)
        self._loop = sampler.decode_loop(capacity=sampler.settings.max_batch_rows, sessions=self._sessions)
        self._prepared = ExitStack()
        # A generator that is still open when the interpreter exits would fail while modules are unloaded.
        weakref.finalize(self, self._prepared.close)
        self._is_prepared = self._is_paused = False

    def __len__(self) -> int:
        return len(self._rows)

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str], wait_s: float, weight_version: int
    ) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Advance the rows and return those that ended; tokens drawn now are marked with `weight_version`."""
        try:
            with self._sampler.without_gradients():
                self._loop.remove([row for name in cancelled if (row := self._rows.pop(name, None)) is not None])
                news = self._admit(arrivals)
                if not self._is_paused:
                    self._loop.weight_version = weight_version
                    return news | self._collect(self._compute(0.0 if news else wait_s)) | self._unfinished()
        except BaseException:
            self.clear()  # a step that does not finish leaves keys and values incomplete
            raise
        time.sleep(min(wait_s, _PAUSED_WAIT_S))
        return news

    def pause(self) -> None:
        """Hold all rows while the weights change, and discard everything computed from the old ones."""
        self._is_paused = True
        self.drop_cache()

    def resume(self) -> None:
        """Continue; rows keep their tokens, and their keys and values are computed again."""
        self._is_paused = False

    def drop_cache(self) -> None:
        """Discard keys, values and packed weights."""
        self._loop.recompute()
        self._release()

    def release_if_idle(self) -> None:
        """Free packed weights and sessions unless rows are in flight."""
        if not self._rows:
            self._release()

    def close_sessions(self, sessions: Sequence[str]) -> None:
        """Discard what is kept of these sessions."""
        self._sessions.close(sessions)

    def clear(self) -> None:
        """Drop all rows."""
        self.drop_cache()
        self._loop.remove(self._rows.values())
        self._rows.clear()

    def _admit(self, arrivals: Sequence[GenerationRequest]) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """Let rows join; returns the errors of those that cannot be completed."""
        refused: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        joined: list[Row] = []
        for arrival in arrivals:
            try:
                [row] = self._sampler.read(arrival.row, greedy=arrival.greedy)
            except DataError as error:
                refused[arrival.name] = error
                continue
            row.session = arrival.row["session_ids"][0] if "session_ids" in arrival.row else None
            row.streams = "stream_tokens" in arrival.row and bool(arrival.row["stream_tokens"][0])
            self._rows[arrival.name] = row
            joined.append(row)
        self._loop.add(joined)
        return refused

    def _compute(self, wait_s: float) -> list[Row]:
        """Draw tokens until rows end, which are returned, or `wait_s` is over; at least one step."""
        until = time.monotonic() + wait_s
        ended: list[Row] = []
        while self._rows and not ended:
            if not self._is_prepared:
                steps = self._sampler.settings.max_new_tokens
                self._prepared.enter_context(self._sampler.prepared(rows=PACKED_ROWS, steps=steps))
                self._is_prepared = True
            ended = self._loop.step()
            if time.monotonic() >= until:
                break
        return ended

    def _collect(self, ended: Sequence[Row]) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        names = {id(row): name for name, row in self._rows.items()}
        results: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        for row in ended:
            name = names[id(row)]
            del self._rows[name]
            results[name] = row.error or to_output([row.so_far()])
        if ended and not self._rows:
            return_freed_memory()
        return results

    def _unfinished(self) -> dict[str, BatchedDataDict[Any] | RLCoreError]:
        """The rows that are streamed and have new tokens, with all their tokens."""
        results: dict[str, BatchedDataDict[Any] | RLCoreError] = {}
        for name, row in self._rows.items():
            if row.streams and len(row.tokens) > row.streamed:
                row.streamed = len(row.tokens)
                results[name] = BatchedDataDict({**to_output([row.so_far()]), "unfinished": torch.tensor([True])})
        return results

    def _release(self) -> None:
        self._sessions.clear()
        self._prepared.close()
        self._is_prepared = False
