"""Streams single rows over the replicas of an engine, where rows of one prompt or session share a replica.

A replica is polled repeatedly (`GenerationWorker.poll`): each call passes the rows that arrived since the last one and returns
those that have ended. A row is cancelled if its consumer goes away. Other methods, such as those of a refit, run between polls.

While a replica that died is restarted and receives its weights, in a thread, its rows wait and are then sampled again; the rows
of other replicas continue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_backends_base.replica_rows import ReplicaAffinity
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.worker_group import PendingCall, WorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError
from rl_core.interfaces.worker import GenerationRequest

_WAIT_S = 0.05
"""Duration of a poll if no row ends; a row that arrives meanwhile waits at most this long. In this process, where a poll blocks
the event loop, a poll is one step: the steps in which rows join then depend on no clock."""
_LOOK_S = 1.0
"""Interval of checks, while a call is pending, that Ray itself is alive."""
_names = itertools.count()
_log = logging.getLogger(__name__)


class ReplicaRecovery(Protocol):
    """Restarts dead replicas; `DistributedGeneration` implements it. The last two methods block and are called in threads."""

    def restarts_of(self, rank: int) -> int:
        """Number of restarts of a replica so far."""

    def lacks_weights(self, rank: int) -> bool:
        """Whether a replica was restarted and must not sample yet."""

    def await_weights(self) -> None:
        """Wait until every restarted replica has its weights."""

    def recover(self, rank: int, cause: WorkerDiedError, restarts_before: int) -> None:
        """Restart a dead replica and wait for its weights."""


@dataclass
class _Replica:
    """Messages to one replica, and its rows in flight."""

    arrivals: list[GenerationRequest] = field(default_factory=list)
    in_flight: dict[str, tuple[GenerationRequest, asyncio.Queue[Any]]] = field(default_factory=dict)
    cancellations: list[PendingCall] = field(default_factory=list)
    last_progress: float = 0.0
    is_recovering: bool = False
    """Whether it is being restarted or refitted; it is not called meanwhile."""


class RowStream:
    """The rows in flight on the replicas of one engine; used from one event loop at a time.

    Args:
        group: workers with `poll`.
        deadline_s: maximum time without any row of a replica ending.
        recovery: restarts dead replicas.
    """

    def __init__(self, group: WorkerGroup, *, deadline_s: float, recovery: ReplicaRecovery) -> None:
        self._group, self._deadline_s, self._recovery = group, deadline_s, recovery
        self._wait_s = 0.0 if isinstance(group, InProcessWorkerGroup) else _WAIT_S
        self._replicas = [_Replica() for _ in range(group.world_size)]
        self._affinity = ReplicaAffinity(group.world_size)
        self._pumps: dict[int, asyncio.Task[None]] = {}

    def close_sessions(self, sessions: Sequence[str], *, notify_replicas: bool = True) -> None:
        """Forget sessions, and let their replicas discard what they keep for them; returns without waiting for the replicas."""
        closed: dict[int, list[str]] = {}
        for session in sessions:
            rank = self._affinity.close(session)
            if rank is not None and notify_replicas:
                closed.setdefault(rank, []).append(session)
        for rank, names in closed.items():
            if not self._replicas[rank].is_recovering:  # a new process keeps nothing
                self._group.submit_one("close_sessions", names, rank=rank, deadline_s=self._deadline_s)

    async def rows(self, data: BatchedDataDict[Any], *, greedy: bool) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yield (row, its output) as rows end, or have new tokens (`stream_tokens`); closing the iterator cancels the others.

        Raises:
            DataError: a row of this call cannot be completed.
            WorkerError: a replica failed with rows of this call, or died and could not be restarted and refitted.
            WeightSyncError: a restarted replica could not be refitted.
            DeadlineExceededError: a replica finished no row for too long.
            UserError: rows are in flight in another event loop that is still running.
        """
        ended: asyncio.Queue[Any] = asyncio.Queue()
        places: dict[str, tuple[int, int]] = {}
        try:
            for row in range(data.size):
                name, request_row = f"stream-{next(_names)}", data if data.size == 1 else data.slice(row, row + 1)
                rank = self._affinity.assign(name, request_row)
                places[name] = (row, rank)
                self._begin(rank, GenerationRequest(name=name, row=request_row, greedy=greedy), ended)
            while places:
                name, output = await ended.get()
                if isinstance(output, Exception):
                    raise output
                row, _ = places[name] if "unfinished" in output else places.pop(name)
                yield row, output
        finally:
            # Nothing is awaited here: a closing event loop may close the iterator without resuming it.
            for rank in {rank for _, rank in places.values()}:
                self._cancel(rank, [name for name, place in places.items() if place[1] == rank])

    def _begin(self, rank: int, arrival: GenerationRequest, consumer: asyncio.Queue[Any]) -> None:
        replica, pump = self._replicas[rank], self._pumps.get(rank)
        if pump is not None and not pump.done() and pump.get_loop() is not asyncio.get_running_loop():
            if pump.get_loop().is_running():
                raise UserError("generate_async has rows in another event loop. Use one event loop for all rows of an engine.")
            self._cancel(rank, list(replica.in_flight))  # the loop has ended
            pump = None
        if not replica.in_flight:
            replica.last_progress = asyncio.get_running_loop().time()
            replica.cancellations.clear()
        replica.arrivals.append(arrival)
        replica.in_flight[arrival.name] = arrival, consumer
        if pump is None or pump.done():
            self._pumps[rank] = asyncio.ensure_future(self._pump(rank))

    def _cancel(self, rank: int, names: Sequence[str]) -> None:
        replica = self._replicas[rank]
        waiting = {arrival.name for arrival in replica.arrivals}
        known = {name for name in names if self._end(replica, name) is not None}
        replica.arrivals = [arrival for arrival in replica.arrivals if arrival.name not in known]
        self._cancel_on_replica(rank, sorted(known - waiting))

    def _cancel_on_replica(self, rank: int, cancelled: Sequence[str]) -> None:
        """Cancel rows of the replica; results of other rows in the same call are left to the pump."""
        if not cancelled or self._replicas[rank].is_recovering:
            return
        try:
            self._replicas[rank].cancellations.append(self._call(rank, [], cancelled=cancelled, wait_s=0.0))
        except Exception as error:  # as in `_poll`
            self._fail(self._replicas[rank], error)

    def _call(self, rank: int, arrivals: Sequence[GenerationRequest], **kwargs: Any) -> PendingCall:
        return self._group.submit_one("poll", arrivals, rank=rank, deadline_s=self._deadline_s, **kwargs)

    async def _pump(self, rank: int) -> None:
        """Poll one replica until it has no rows in flight."""
        replica = self._replicas[rank]
        while replica.in_flight:
            try:
                await self._poll_or_recover(rank)
            except Exception as error:  # passed to every consumer of this replica, which raises it
                names = list(replica.in_flight)
                self._fail(replica, error)
                if isinstance(error, WorkerDiedError):
                    self._affinity.excluded.add(rank)  # later calls use the other replicas
                elif not isinstance(error, DeadlineExceededError):
                    self._cancel_on_replica(rank, names)
            await asyncio.sleep(0)  # let consumers run first: a replica in this process blocks the loop while it works

    async def _poll_or_recover(self, rank: int) -> None:
        recovery = self._recovery
        restarts = recovery.restarts_of(rank)
        if recovery.lacks_weights(rank):
            await self._recover(rank, recovery.await_weights)
            return
        try:
            # Another thread may restart the replica at any time: the new worker must not sample before its refit.
            if not await self._poll(rank, lambda: recovery.restarts_of(rank) != restarts):
                await self._recover(rank, recovery.await_weights)
        except WorkerDiedError as error:
            cause = error
            await self._recover(rank, lambda: recovery.recover(rank, cause, restarts))

    async def _recover(self, rank: int, step: Callable[[], None]) -> None:
        """Run a blocking step of a restart in a thread, then send all rows in progress to the new worker."""
        replica = self._replicas[rank]
        _log.warning("%d rows in progress wait for the restart of generation replica %d", len(replica.in_flight), rank)
        replica.is_recovering = True
        try:
            await asyncio.to_thread(step)
        finally:
            replica.is_recovering = False
        replica.cancellations.clear()
        replica.arrivals = [request for request, _ in replica.in_flight.values()]
        replica.last_progress = asyncio.get_running_loop().time()

    async def _poll(self, rank: int, was_replaced: Callable[[], bool]) -> bool:
        """Pass arrivals to a replica and its results to their consumers; False, without results, if it was replaced."""
        replica = self._replicas[rank]
        arrivals, replica.arrivals = replica.arrivals, []
        calls = [self._call(rank, arrivals, wait_s=self._wait_s)]
        while calls:
            call = calls.pop()
            ended = await _result(call, self._deadline_s) if self._wait_s else call.result()  # in this process it has ended
            if was_replaced():
                return False
            self._deliver(replica, ended)
            calls, replica.cancellations = calls + replica.cancellations, []
        if replica.in_flight and asyncio.get_running_loop().time() - replica.last_progress > self._deadline_s:
            names = list(replica.in_flight)
            self._fail(
                replica,
                DeadlineExceededError(
                    f"{self._group.describe_rank(rank)} has finished none of its {len(names)} rows for {self._deadline_s:g} s. "
                    "If rows take this long, raise `cluster.deadlines.generate_s` or lower `max_new_tokens`. Otherwise, check "
                    "the log of this worker."
                ),
            )
            self._cancel_on_replica(rank, names)
        return True

    def _deliver(self, replica: _Replica, ended: dict[str, BatchedDataDict[Any] | Exception]) -> None:
        if ended:
            replica.last_progress = asyncio.get_running_loop().time()
        for name, output in ended.items():
            if isinstance(output, BatchedDataDict) and "unfinished" in output:
                _, consumer = replica.in_flight.get(name, (None, None))
            else:
                consumer = self._end(replica, name)
            if consumer is not None:  # otherwise it was cancelled while its result was on the way
                consumer.put_nowait((name, output))

    def _end(self, replica: _Replica, name: str) -> asyncio.Queue[Any] | None:
        """The consumer of a row that is no longer in flight; None if it was not."""
        entry = replica.in_flight.pop(name, None)
        if entry is None:
            return None
        self._affinity.release(name)
        return entry[1]

    def _fail(self, replica: _Replica, error: Exception) -> None:
        for name in list(replica.in_flight):
            if (consumer := self._end(replica, name)) is not None:
                consumer.put_nowait((name, error))
        replica.arrivals = []


async def _result(call: PendingCall, deadline_s: float) -> Any:
    """Await the result of a call without blocking other tasks."""
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline_s
    answered: asyncio.Future[None] = loop.create_future()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop was closed before the worker answered
            loop.call_soon_threadsafe(answered.set_result, None)

    call.on_done(notify)
    while loop.time() <= until:
        await asyncio.wait([answered], timeout=min(_LOOK_S, deadline_s))
        if call.poll(0.0):
            break
    return call.result(0.0)
