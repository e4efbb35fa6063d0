"""Rows that come and go one by one over the replicas of an engine: each goes where the fewest are under way; knows no engine.

Every replica has one `GenerationWorker.exchange` under way at most, which takes what has arrived since the last and brings what
has ended. A row's consumer that goes away cancels its row. Other verbs, such as those of a refit, run between two exchanges.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from rl_core.cluster.worker_group import PendingCall, WorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DeadlineExceededError
from rl_core.interfaces.worker import Arrival

_WAIT_S = 0.1
"""How long a replica works on before it asks for news; a row that arrives meanwhile waits that long at most."""
_names = itertools.count()


@dataclass
class _Replica:
    """What one replica is to be told, and what it works on."""

    arrivals: list[Arrival] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    under_way: dict[str, asyncio.Queue[Any]] = field(default_factory=dict)
    last_news: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.arrivals or self.cancelled or self.under_way)


class RowStream:
    """The rows under way on the replicas of one engine; used from one event loop at a time.

    Args:
        group: workers with `exchange`.
        deadline_s: how long a replica may work on without any of its rows ending.
    """

    def __init__(self, group: WorkerGroup, *, deadline_s: float) -> None:
        self._group, self._deadline_s = group, deadline_s
        self._replicas = [_Replica() for _ in range(group.world_size)]
        self._pumps: dict[int, asyncio.Task[None]] = {}

    @property
    def load(self) -> list[int]:
        """Rows under way on each replica."""
        return [len(replica.under_way) for replica in self._replicas]

    async def rows(self, data: BatchedDataDict[Any], *, greedy: bool) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yield (row, its output) as each ends; leaving the iterator cancels what has not.

        Raises:
            WorkerError: a replica failed or died with rows of this call.
            DeadlineExceededError: a replica brought nothing for too long.
        """
        ended: asyncio.Queue[Any] = asyncio.Queue()
        places: dict[str, tuple[int, int]] = {}
        try:
            for row in range(data.size):
                rank = min(range(len(self._replicas)), key=lambda rank: len(self._replicas[rank].under_way))
                name = f"stream-{next(_names)}"
                places[name] = (row, rank)
                self._replicas[rank].arrivals.append(Arrival(name=name, row=data.slice(row, row + 1), greedy=greedy))
                self._replicas[rank].under_way[name] = ended
                self._start_pump(rank)
            while places:
                name, output = await ended.get()
                if isinstance(output, Exception):
                    raise output
                row, _ = places.pop(name)
                yield row, output
        finally:
            for name, (_, rank) in places.items():
                self._cancel(rank, name)

    def _cancel(self, rank: int, name: str) -> None:
        replica = self._replicas[rank]
        if replica.under_way.pop(name, None) is None:
            return
        waiting = [arrival for arrival in replica.arrivals if arrival.name != name]
        if len(waiting) == len(replica.arrivals):
            replica.cancelled.append(name)
            self._start_pump(rank)
        replica.arrivals = waiting

    def _start_pump(self, rank: int) -> None:
        pump = self._pumps.get(rank)
        if pump is None or pump.done():
            loop = asyncio.get_running_loop()
            self._replicas[rank].last_news = loop.time()
            self._pumps[rank] = loop.create_task(self._pump(rank))

    async def _pump(self, rank: int) -> None:
        """Exchange with one replica until it has nothing to do."""
        replica = self._replicas[rank]
        while not replica.is_idle:
            arrivals, cancelled = replica.arrivals, replica.cancelled
            replica.arrivals, replica.cancelled = [], []
            try:
                call = self._group.submit_one(
                    "exchange", arrivals, rank=rank, cancelled=cancelled, wait_s=_WAIT_S, deadline_s=self._deadline_s
                )
                finished = await _result(call, self._deadline_s)
            except Exception as error:  # handed to every consumer of this replica, which raises it
                _fail(replica, error)
                return
            self._deliver(replica, finished)

    def _deliver(self, replica: _Replica, finished: dict[str, BatchedDataDict[Any]]) -> None:
        now = asyncio.get_running_loop().time()
        if finished or not replica.under_way:
            replica.last_news = now
        elif now - replica.last_news > self._deadline_s:
            _fail(replica, DeadlineExceededError(f"A generation replica has finished no row for {self._deadline_s:g} s."))
        for name, output in finished.items():
            consumer = replica.under_way.pop(name, None)
            if consumer is not None:  # else it was cancelled while its answer was on the way
                consumer.put_nowait((name, output))


def _fail(replica: _Replica, error: Exception) -> None:
    for name, consumer in replica.under_way.items():
        consumer.put_nowait((name, error))
    replica.under_way, replica.arrivals, replica.cancelled = {}, [], []


async def _result(call: PendingCall, deadline_s: float) -> Any:
    """The result of a call, while other tasks run."""
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline_s
    while not call.poll(0.0):
        if loop.time() > until:
            return call.result(0.0)
        await asyncio.sleep(0.002)
    await asyncio.sleep(0)
    return call.result(0.0)
