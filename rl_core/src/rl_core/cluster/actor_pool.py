"""Identical actors that share a list of calls; one that dies or hangs is replaced and its call run again.

State that an actor keeps between calls is lost with it, so workers should be stateless, or nearly so.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from rl_core.cluster import daemons
from rl_core.cluster.deadlines import Deadlines, exceeded
from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.isolation import runtime_env_of
from rl_core.cluster.ray_calls import collect
from rl_core.cluster.ray_runtime import RayLease
from rl_core.cluster.remote_actor import (
    ActorCall,
    RemoteActor,
    is_wrapped,
    own_options,
    pack_worker,
    plain_class,
    resolve,
    wait_gone,
)
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext

_log = logging.getLogger(__name__)
_BUILD = -1  # the index of a slot's "call" while its actor is being built


class Pool(ABC):
    """Interface of a pool, either of Ray actors or of one object in this process.

    Attributes:
        worker_class: Module and name of the class of its workers, for errors.
    """

    worker_class: str = "unknown"

    @property
    @abstractmethod
    def num_actors(self) -> int:
        """Number of calls that run at a time."""

    @abstractmethod
    def map(self, method: str, calls: Sequence[Any], *, deadline_s: float | None = None) -> list[Any]:
        """Run `method(*call)` for each call, a tuple of positional arguments or the only argument; results in order.

        Raises:
            WorkerError: A call raised; the other running calls are allowed to finish first.
            WorkerDiedError: The actor of one call died too often; names the call.
            DeadlineExceededError: One call exceeded its deadline too often; includes the stack of the last attempt.
        """

    def run_one(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """`method(*args)` on any one actor."""
        return self.map(method, [args], deadline_s=deadline_s)[0]

    @abstractmethod
    def shutdown(self) -> None:
        """Run each actor's own `shutdown()`, then stop the processes. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


@dataclass
class _Slot:
    """One slot of the pool: its actor and the actor's current call (None if idle)."""

    actor: RemoteActor
    flight: ActorCall
    call: int | None
    until: float


class ActorPool(Pool):
    """A pool of Ray actors.

    Calls from several threads run one after another.

    Args:
        cluster: Cluster whose Ray is used; None joins or starts one as `RayVirtualCluster` does.
        worker_class: A plain class, or one wrapped in `@ray.remote`: then its own options apply, and the pool has one
            actor.
        num_actors: Number of actors.
        kwargs: Constructor arguments.
        deadline_s: Default deadline of a call; None for `deadlines.call_s`.
        max_restarts: Maximum number of retries of a call after its actor died or exceeded its deadline.
        actor_options: Ray options of each actor; by default no CPU is reserved, so a pool fits on any node.
        env_vars: Environment variables of the actors; OMP_NUM_THREADS is 1 by default.
        python: Interpreter of the actors, if not the driver's.
        name: Name of the pool in errors and logs.
        deadlines: Deadlines of starting and stopping.

    Raises:
        WorkerError: A constructor raised.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster | None,
        worker_class: Any,
        num_actors: int = 1,
        kwargs: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        *,
        max_restarts: int = 2,
        actor_options: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        python: str | Path | None = None,
        name: str = "",
        deadlines: Deadlines | None = None,
    ) -> None:
        if num_actors < 1:
            raise UserError(f"a pool needs at least one actor, found num_actors={num_actors}")
        self.worker_class = _name_of(worker_class)
        self._num_actors = 1 if is_wrapped(worker_class) else num_actors
        self._name = name or plain_class(worker_class).__name__
        self._deadlines = deadlines or Deadlines()
        self._deadline_s = self._deadlines.call_s if deadline_s is None else deadline_s
        self._max_restarts = max_restarts
        self._options = {**own_options(worker_class), **(actor_options or {})}
        own_env: Mapping[str, Any] = self._options.pop("runtime_env", None) or {}
        self._runtime_env = {**own_env, **runtime_env_of(python)}
        self._env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **(env_vars or {})}
        self._turn = threading.Lock()
        self._slots: list[_Slot] = []
        # Hold a separate lease on Ray, because the cluster may be shut down before the pool.
        self._lease = RayLease()
        try:
            self._packed = pack_worker(worker_class, kwargs or {})
            self._slots = [self._fill(index) for index in range(self._num_actors)]
            collect([slot.flight for slot in self._slots], deadline_s=self._deadlines.start_s, deadlines=self._deadlines)
            for slot in self._slots:
                slot.call = None
        except BaseException:
            self._end()
            raise

    @property
    def num_actors(self) -> int:
        return self._num_actors

    def pids(self) -> list[int]:
        """The process id of each actor, on its host."""
        return [slot.actor.identity.pid for slot in self._slots if slot.actor.identity is not None]

    def map(self, method: str, calls: Sequence[Any], *, deadline_s: float | None = None) -> list[Any]:
        with self._turn:
            if not self._slots:
                raise UserError(f"pool '{self._name}' was shut down; {method}() cannot run on it")
            job = _Job(method, calls, self._deadline_s if deadline_s is None else deadline_s)
            while not job.is_over(self._slots):
                self._dispatch(job)
                self._take_in(job)
            if job.error is not None:
                raise job.error
            return [job.results[index] for index in range(len(calls))]

    def shutdown(self) -> None:
        slots = [] if daemons.is_dead() else [slot for slot in self._slots if slot.actor.is_alive()]
        try:
            flights = [slot.actor.close() for slot in slots]
            collect(flights, deadline_s=self._deadlines.stop_s, deadlines=self._deadlines)
        except (WorkerError, DeadlineExceededError) as error:
            # The work is done and its results are safe: log the failure and stop the processes anyway.
            _log.warning("pool '%s' did not shut down by itself: %s", self._name, error)
        finally:
            self._end()

    def _end(self) -> None:
        slots, self._slots = self._slots, []
        if ray.is_initialized():
            for slot in slots:
                slot.actor.kill()
            wait_gone([slot.actor for slot in slots])
        self._lease.release()

    def _fill(self, index: int) -> _Slot:
        """Start an actor; its slot is busy until it is built."""
        actor = RemoteActor(
            f"actor {index} of pool '{self._name}'",
            group=self._name,
            options=self._options,
            env=self._env,
            runtime_env=self._runtime_env,
        )
        context = WorkerContext(
            rank=index,
            world_size=self._num_actors,
            local_rank=index,
            node_rank=0,
            master_address="",
            master_port=0,
            num_threads=int(self._env["OMP_NUM_THREADS"]),
        )
        flight = actor.build(self._packed, context, self._env)
        return _Slot(actor, flight, _BUILD, time.monotonic() + self._deadlines.start_s)

    def _dispatch(self, job: _Job) -> None:
        for slot in self._slots:
            if slot.call is None and job.waiting and job.error is None:
                slot.call = job.waiting.popleft()
                slot.flight = slot.actor.call(job.method, ((), {}), *job.arguments(slot.call))
                slot.until = time.monotonic() + job.deadline_s

    def _take_in(self, job: _Job) -> None:
        """Wait until a call ends or exceeds its deadline, and handle it."""
        busy = {slot.flight.ref: index for index, slot in enumerate(self._slots) if slot.call is not None}
        if not busy:
            return
        until = min(self._slots[index].until for index in busy.values())
        ready = daemons.wait(list(busy), num_returns=1, timeout_s=max(until - time.monotonic(), 0.0))
        for ref in ready:
            self._landed(busy[ref], job)
        if not ready:
            for index in busy.values():
                if time.monotonic() >= self._slots[index].until:
                    self._outlived(index, job)

    def _landed(self, index: int, job: _Job) -> None:
        slot = self._slots[index]
        call, slot.call = slot.call, None
        landing = resolve(slot.flight)
        if isinstance(landing.error, WorkerDiedError):
            self._replace(index, call, landing.error, job)
        elif landing.error is not None:
            job.fail(landing.error)
            if call == _BUILD:  # the actor has no worker: retry when the pool is used again
                self._slots[index] = self._fill(index)
        elif call is not None and call != _BUILD:
            job.results[call] = landing.value

    def _outlived(self, index: int, job: _Job) -> None:
        """Handle a call or an actor's start that exceeded its deadline."""
        slot = self._slots[index]
        report = slot.flight.unanswered(self._deadlines.stack_s)
        error = exceeded(round(report.seconds, 1), [report], [])
        call, slot.call = slot.call, None
        slot.actor.kill()
        wait_gone([slot.actor])
        self._replace(index, call, error, job)

    def _replace(self, index: int, call: int | None, error: WorkerDiedError | DeadlineExceededError, job: _Job) -> None:
        _log.warning("pool '%s': replacing an actor that failed: %s", self._name, error)
        with suppress(ray.exceptions.RayError):  # in most cases it is already dead
            self._slots[index].actor.kill()
        self._slots[index] = self._fill(index)
        tries = job.count_try(call)
        if tries <= self._max_restarts:
            if call is not None and call != _BUILD:
                job.waiting.appendleft(call)
            return
        what = "building the actor" if call == _BUILD else f"call {call} of {job.method}()"
        job.fail(
            type(error)(
                f"pool '{self._name}': {what} failed {tries} times, each in a fresh process "
                f"(max_restarts={self._max_restarts}); the last error:\n{error}"
            )
        )


class _Job:
    """State of one `map`: pending calls, results and the first error."""

    def __init__(self, method: str, calls: Sequence[Any], deadline_s: float) -> None:
        self.method = method
        self.deadline_s = deadline_s
        self.waiting = deque(range(len(calls)))
        self.results: dict[int, Any] = {}
        self.error: WorkerError | DeadlineExceededError | None = None
        self._calls = calls
        self._tries: dict[int | None, int] = {}

    def arguments(self, call: int) -> tuple[Any, ...]:
        item = self._calls[call]
        return item if isinstance(item, tuple) else (item,)

    def count_try(self, call: int | None) -> int:
        self._tries[call] = self._tries.get(call, 0) + 1
        return self._tries[call]

    def fail(self, error: WorkerError | DeadlineExceededError) -> None:
        self.error = self.error or error

    def is_over(self, slots: Sequence[_Slot]) -> bool:
        """Whether no call of this job is pending or running; an actor that is being built does not count."""
        running = any(slot.call is not None and slot.call != _BUILD for slot in slots)
        return not running and (self.error is not None or len(self.results) == len(self._calls))


class InProcessPool(Pool):
    """A pool of one object in this process, without Ray; deadlines do not apply.

    Args:
        worker_class: A plain class, or one wrapped in `@ray.remote`, which is unwrapped.
        kwargs: Constructor arguments.
        name: Name of the pool in errors.
    """

    def __init__(self, worker_class: Any, kwargs: Mapping[str, Any] | None = None, *, name: str = "") -> None:
        self.worker_class = _name_of(worker_class)
        self._group = InProcessWorkerGroup(plain_class(worker_class), worker_kwargs=kwargs, name=name)

    @property
    def num_actors(self) -> int:
        return 1

    def map(self, method: str, calls: Sequence[Any], *, deadline_s: float | None = None) -> list[Any]:
        return [self._group.run_each(method, [call])[0] for call in calls]

    def shutdown(self) -> None:
        self._group.shutdown()


def _name_of(worker_class: Any) -> str:
    plain = plain_class(worker_class)
    return f"{plain.__module__}.{plain.__qualname__}"
