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
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError
from rl_core.interfaces.worker import Arrival

_WAIT_S = 0.1
"""How long a replica works on before it asks for news; a row that arrives meanwhile waits that long at most."""
_POLL_S = 0.002
_names = itertools.count()


@dataclass
class _Replica:
    """What one replica is to be told, and what it works on."""

    arrivals: list[Arrival] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    under_way: dict[str, asyncio.Queue[Any]] = field(default_factory=dict)
    last_news: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def load(self) -> list[int]:
        """Rows under way on each replica."""
        return [len(replica.under_way) for replica in self._replicas]

    async def rows(self, data: BatchedDataDict[Any], *, greedy: bool) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yield (row, its output) as each ends; leaving the iterator cancels what has not, and waits until replicas know.

        Raises:
            DataError: a row of this call cannot be completed.
            WorkerError: a replica failed or died with rows of this call.
            DeadlineExceededError: a replica brought nothing for too long.
            UserError: rows are under way in another event loop, which still runs.
        """
        self._enter_loop()
        ended: asyncio.Queue[Any] = asyncio.Queue()
        places: dict[str, tuple[int, int]] = {}
        try:
            for row in range(data.size):
                rank = min(range(len(self._replicas)), key=lambda rank: len(self._replicas[rank].under_way))
                name = f"stream-{next(_names)}"
                places[name] = (row, rank)
                self._begin(rank, Arrival(name=name, row=data.slice(row, row + 1), greedy=greedy), ended)
            while places:
                name, output = await ended.get()
                if isinstance(output, Exception):
                    raise output
                row, _ = places.pop(name)
                yield row, output
        finally:
            for name, (_, rank) in places.items():
                self._cancel(rank, name)
            for rank in sorted({rank for _, rank in places.values()}):
                # A task of its own: who is cancelled here may hold what an exchange brings to others.
                await asyncio.shield(asyncio.ensure_future(self._tell(rank)))

    def _enter_loop(self) -> None:
        """Forget the rows of an event loop that has ended: nobody can wait for them any more."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise UserError(
                "generate_async is under way in another event loop. Ask from one loop at a time; rows of several calls in one "
                "loop are sampled together."
            )
        self._loop, self._pumps = loop, {}
        self._replicas = [_Replica(cancelled=[*old.cancelled, *old.under_way]) for old in self._replicas]

    def _begin(self, rank: int, arrival: Arrival, consumer: asyncio.Queue[Any]) -> None:
        replica, pump = self._replicas[rank], self._pumps.get(rank)
        if not replica.under_way:
            replica.last_news = asyncio.get_running_loop().time()
        replica.arrivals.append(arrival)
        replica.under_way[arrival.name] = consumer
        if pump is None or pump.done():
            self._pumps[rank] = asyncio.ensure_future(self._pump(rank))

    def _cancel(self, rank: int, name: str) -> None:
        replica = self._replicas[rank]
        if replica.under_way.pop(name, None) is None:
            return
        waiting = [arrival for arrival in replica.arrivals if arrival.name != name]
        if len(waiting) == len(replica.arrivals):
            replica.cancelled.append(name)
        replica.arrivals = waiting

    async def _tell(self, rank: int) -> None:
        if self._replicas[rank].cancelled:
            await self._exchange(rank, wait_s=0.0)

    async def _pump(self, rank: int) -> None:
        """Exchange with one replica until it has no row under way."""
        while self._replicas[rank].under_way:
            await self._exchange(rank, wait_s=_WAIT_S)
            await asyncio.sleep(0)  # consumers go first: a replica in this process holds the loop while it works

    async def _exchange(self, rank: int, *, wait_s: float) -> None:
        replica = self._replicas[rank]
        async with replica.turn:
            arrivals, cancelled = replica.arrivals, replica.cancelled
            replica.arrivals, replica.cancelled = [], []
            try:
                call = self._group.submit_one(
                    "exchange", arrivals, rank=rank, cancelled=cancelled, wait_s=wait_s, deadline_s=self._deadline_s
                )
                ended = await _result(call, self._deadline_s)
            except (WorkerDiedError, DeadlineExceededError) as error:
                _fail(replica, error)
            except Exception as error:  # handed to every consumer of this replica, which raises it
                replica.cancelled = list(replica.under_way)
                _fail(replica, error)
            else:
                self._deliver(replica, ended)

    def _deliver(self, replica: _Replica, ended: dict[str, BatchedDataDict[Any] | Exception]) -> None:
        now = asyncio.get_running_loop().time()
        if ended:
            replica.last_news = now
        elif replica.under_way and now - replica.last_news > self._deadline_s:
            replica.cancelled = list(replica.under_way)
            _fail(replica, DeadlineExceededError(f"A generation replica has finished no row for {self._deadline_s:g} s."))
        for name, output in ended.items():
            consumer = replica.under_way.pop(name, None)
            if consumer is not None:  # else it was cancelled while its answer was on the way
                consumer.put_nowait((name, output))


def _fail(replica: _Replica, error: Exception) -> None:
    for name, consumer in replica.under_way.items():
        consumer.put_nowait((name, error))
    replica.under_way, replica.arrivals = {}, []


async def _result(call: PendingCall, deadline_s: float) -> Any:
    """The result of a call, while other tasks run."""
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline_s
    while not call.poll(0.0) and loop.time() <= until:
        await asyncio.sleep(_POLL_S)
    return call.result(0.0)
