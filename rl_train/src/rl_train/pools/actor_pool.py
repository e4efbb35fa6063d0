"""Identical actors that share a queue of calls; one that dies or hangs is replaced, and its calls fail.

State that an actor keeps between calls is lost with it, so workers should be stateless, or nearly so. A thread per pool assigns
calls to actors, so calls may be submitted from any thread, and none waits for calls that were submitted together with it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.cluster import daemons
from rl_core.cluster.isolation import runtime_env_of
from rl_core.cluster.ray_runtime import RayLease
from rl_core.cluster.remote_actor import ActorCall, RemoteActor, is_wrapped, pack_worker, plain_class, ray_options, wait_exited
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.cluster.worker_group import Deadlines, PendingCall, deadline_error
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext
from rl_train.pools.pool import ActorKey, Pool, class_path

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
"""Period in which the death of a Ray daemon is noticed."""


class ActorPool(Pool):
    """A pool of Ray actors.

    Args:
        cluster: Cluster whose Ray is used; None joins or starts one as `RayVirtualCluster` does.
        worker_class: A plain class, or one wrapped in `@ray.remote`: then its own options apply, and the pool has one
            actor.
        num_actors: Number of actors.
        kwargs: Constructor arguments.
        deadline_s: Default deadline of a call; None for `deadlines.call_s`.
        max_restarts: Maximum number of times that a replacement of an actor is started again because its start failed.
        max_concurrency: Number of calls that an actor runs at the same time. Above 1, they run in threads.
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
        max_concurrency: int = 1,
        actor_options: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        python: str | Path | None = None,
        name: str = "",
        deadlines: Deadlines | None = None,
    ) -> None:
        if num_actors < 1:
            raise UserError(f"a pool needs at least one actor, found num_actors={num_actors}")
        self.worker_class = class_path(worker_class)
        self._num_actors = 1 if is_wrapped(worker_class) else num_actors
        self._max_concurrency = max_concurrency
        self._name = name or plain_class(worker_class).__name__
        self._deadlines = deadlines or Deadlines()
        self._deadline_s = self._deadlines.call_s if deadline_s is None else deadline_s
        self._max_restarts = max_restarts
        self._options = {**ray_options(worker_class), **(actor_options or {})}
        if max_concurrency > 1:
            self._options["max_concurrency"] = max_concurrency + 1  # `close` must not wait for calls
        own_env: Mapping[str, Any] = self._options.pop("runtime_env", None) or {}
        self._runtime_env = {**own_env, **runtime_env_of(python)}
        self._env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **(env_vars or {})}
        self._changed = threading.Condition()
        self._waiting: deque[SubmittedCall] = deque()
        self._ready: deque[Any] = deque()
        self._arrived = self._closed = False
        self._generations = itertools.count()
        self._thread: threading.Thread | None = None
        self._slots: list[Slot] = []
        # Hold a separate lease on Ray, because the cluster may be shut down before the pool.
        self._lease = RayLease()
        try:
            self._packed = pack_worker(worker_class, kwargs or {})
            self._slots = [self._fill(index) for index in range(self._num_actors)]
            builds = [slot.building for slot in self._slots if slot.building is not None]
            PendingCall(builds, deadline_s=self._deadlines.start_s, deadlines=self._deadlines).result()
            for slot in self._slots:
                slot.building = None
        except BaseException:
            self._end()
            raise

    @property
    def num_actors(self) -> int:
        return self._num_actors

    @property
    def max_concurrency(self) -> int:
        return self._max_concurrency

    @property
    def actors(self) -> list[ActorKey]:
        return [slot.key for slot in self._slots if not slot.failed]

    def pids(self) -> list[int]:
        """The process id of each actor, on its host."""
        return [slot.actor.identity.pid for slot in self._slots if slot.actor.identity is not None]

    def submit(self, method: str, *args: Any, deadline_s: float | None = None, on: ActorKey | None = None) -> Future[Any]:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        call = SubmittedCall(method=method, args=args, deadline_s=deadline_s, on=on)
        daemons.raise_if_dead()
        with self._changed:
            if self._closed:
                raise UserError(f"pool '{self._name}' was shut down; {method}() cannot run on it")
            self._waiting.append(call)
            self._arrived = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"rlcore-pool-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify()
        return call.future

    def shutdown(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        slots = [] if daemons.is_dead() else [slot for slot in self._slots if slot.actor.is_alive()]
        try:
            closes = [slot.actor.close() for slot in slots]
            PendingCall(closes, deadline_s=self._deadlines.stop_s, deadlines=self._deadlines).result()
        except (WorkerError, DeadlineExceededError) as error:
            # The work is done and its results are safe: log the failure and stop the processes anyway.
            _log.warning("pool '%s' did not shut down by itself: %s", self._name, error)
        finally:
            self._end()

    def _end(self) -> None:
        slots, self._slots = self._slots, []
        if self._lease.is_connected():
            for slot in slots:
                slot.actor.kill()
            wait_exited([slot.actor for slot in slots])
        self._lease.release()

    def _serve(self) -> None:
        """Assign calls to actors and pass on their results, until the pool is shut down."""
        daemons.mark_background_thread()
        error: BaseException = UserError(f"pool '{self._name}' was shut down before the call ended")
        try:
            while not self._closed:
                self._dispatch()
                self._wait_for_outcomes()
        except BaseException as raised:  # Ray died: every call ends with that reason
            error = raised
        with self._changed:
            self._closed = True
            calls = [*self._waiting, *(call for slot in self._slots for call, _, _ in slot.running.values())]
        for call in calls:
            call.settle(error=error)

    def _fill(self, index: int, tries: int = 1) -> Slot:
        """Start an actor; its slot takes calls once it is built."""
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
        build = actor.build(self._packed, context, self._env)
        return Slot(actor, ActorKey(index, next(self._generations)), build, time.monotonic() + self._deadlines.start_s, tries)

    def _dispatch(self) -> None:
        if self._waiting and all(slot.failed for slot in self._slots):
            for index in range(len(self._slots)):
                self._refill(index)
        with self._changed:
            self._arrived = False
            calls = deque(self._waiting)
            self._waiting.clear()
        unassigned: list[SubmittedCall] = []
        try:
            while calls:
                if not self._assigned(calls[0]):
                    unassigned.append(calls[0])
                calls.popleft()
        finally:  # also if Ray died: the calls that were not assigned then end with that error
            with self._changed:
                self._waiting.extendleft(reversed([*unassigned, *calls]))

    def _assigned(self, call: SubmittedCall) -> bool:
        """Start a call on a free actor; False if it has to wait."""
        if call.on is not None and call.on not in self.actors:
            call.settle(error=WorkerDiedError(f"pool '{self._name}': the actor that {call.method}() must run on has died"))
            return True
        free = [slot for slot in self._slots if slot.has_capacity(self._max_concurrency) and call.on in (None, slot.key)]
        if free and call.mark_running():
            slot = min(free, key=lambda slot: len(slot.running))
            self._start(call, slot)
        return bool(free)

    def _start(self, call: SubmittedCall, slot: Slot) -> None:
        try:
            pending = slot.actor.call(call.method, ((), {}), *call.args)
        except UserError as error:  # its arguments cannot be pickled
            return call.settle(error=error)
        slot.running[pending.ref] = call, pending, time.monotonic() + call.deadline_s
        self._announce(pending.ref)

    def _announce(self, ref: Any) -> None:
        """Wake the pool's thread when `ref` is ready."""

        def notify(_: Any) -> None:
            with self._changed:
                self._ready.append(ref)
                self._changed.notify()

        ref.future().add_done_callback(notify)

    def _wait_for_outcomes(self) -> None:
        """Wait until a call arrives, ends or exceeds its deadline, and handle what ended."""
        now = time.monotonic()
        untils = [slot.until for slot in self._slots if slot.building is not None]
        untils += [until for slot in self._slots for _, _, until in slot.running.values()]
        with self._changed:
            if not (self._ready or self._closed or self._arrived):
                self._changed.wait(max(min([now + _LOOK_S, *untils]) - now, 0.0))
            ready = [self._ready.popleft() for _ in range(len(self._ready))]
        daemons.raise_if_dead()
        for ref in ready:
            self._handle_outcome(ref)
        for index in range(len(self._slots)):
            self._check_deadlines(index)

    def _handle_outcome(self, ref: Any) -> None:
        for index, slot in enumerate(self._slots):
            if slot.building is not None and slot.building.ref == ref:
                self._built(index, slot.building)
            elif ref in slot.running:
                self._ended(index, ref)

    def _ended(self, index: int, ref: Any) -> None:
        """Pass on the outcome of a call; if its actor died, all calls of the actor fail, and a new actor takes its place."""
        running = self._slots[index].running
        call, pending, _ = running[ref]
        outcome: tuple[Any, WorkerError | None]
        try:
            outcome = pending.result(), None
        except WorkerDiedError as death:
            others = [other for other, _, _ in running.values() if other is not call]
            self._replace(index, death)
            self._fail([call, *others], death)
            return
        except WorkerError as error:
            outcome = None, error
        del running[ref]  # only now: if Ray died, `_serve` ends the calls that are still here
        call.settle(*outcome)

    def _built(self, index: int, building: ActorCall) -> None:
        slot = self._slots[index]
        try:
            building.result()
        except WorkerDiedError as error:
            self._not_started(index, error)
        except WorkerError as error:
            self._give_up_actor(index, error)
        else:
            slot.building, slot.tries = None, 1

    def _not_started(self, index: int, error: WorkerDiedError | DeadlineExceededError) -> None:
        tries = self._slots[index].tries
        if tries <= self._max_restarts:
            self._replace(index, error, tries=tries + 1)
            return
        self._give_up_actor(index, too_many_starts(self._name, tries, self._max_restarts, error))

    def _check_deadlines(self, index: int) -> None:
        """Handle calls or an actor's start that exceeded the deadline."""
        slot, now = self._slots[index], time.monotonic()
        if slot.building is not None and now >= slot.until:
            self._not_started(index, self._expired(slot, slot.building))
        late = [(call, pending) for call, pending, until in slot.running.values() if now >= until]
        if not late:
            return
        error = self._expired(slot, late[0][1])
        on_time = [call for call, _, until in slot.running.values() if now < until]
        self._replace(index, error)
        self._waiting.extendleft(reversed(on_time))  # not their fault
        self._fail([call for call, _ in late], error)

    def _expired(self, slot: Slot, pending: ActorCall) -> DeadlineExceededError:
        error = deadline_error([pending], [], stack_s=self._deadlines.stack_s)
        slot.actor.kill()
        wait_exited([slot.actor])
        return error

    def _replace(self, index: int, error: WorkerDiedError | DeadlineExceededError, *, tries: int = 1) -> None:
        _log.warning("pool '%s': replacing an actor that failed: %s", self._name, error)
        self._refill(index, tries)

    def _refill(self, index: int, tries: int = 1) -> None:
        self._slots[index].actor.kill()
        slot = self._slots[index] = self._fill(index, tries)
        assert slot.building is not None
        self._announce(slot.building.ref)

    def _fail(self, calls: Sequence[SubmittedCall], error: WorkerDiedError | DeadlineExceededError) -> None:
        for call in calls:
            call.settle(error=type(error)(f"pool '{self._name}': {call.method}() failed; the error:\n{error}"))

    def _give_up_actor(self, index: int, error: WorkerError | DeadlineExceededError) -> None:
        """Continue without an actor that cannot be started; without any, waiting calls fail and later ones start all again."""
        self._slots[index].failed, self._slots[index].building = True, None
        left = len(self.actors)
        _log.warning("pool '%s' continues with %d of %d actors: %s", self._name, left, self._num_actors, error)
        if left:
            return
        with self._changed:
            calls, self._waiting = self._waiting, deque()
        for call in calls:
            call.settle(error=error)


@dataclass(eq=False, kw_only=True)
class SubmittedCall:
    """A submitted call."""

    method: str
    args: tuple[Any, ...]
    deadline_s: float
    on: ActorKey | None = None
    """The only actor that may run it."""
    future: Future[Any] = field(default_factory=Future)

    def mark_running(self) -> bool:
        """Mark it as running; False if it was cancelled before."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the call with a value or an error, unless it was cancelled."""
        if not self.mark_running():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


@dataclass(eq=False)
class Slot:
    """One slot of the pool: its actor, and the actor's current calls."""

    actor: RemoteActor
    key: ActorKey
    building: ActorCall | None
    """The start of the actor; None once it is ready."""
    until: float
    """Deadline of the start."""
    tries: int = 1
    """Number of actors that were started in a row without becoming ready."""
    failed: bool = False
    """Whether the start failed; another actor is started only once all slots have failed."""
    running: dict[Any, tuple[SubmittedCall, ActorCall, float]] = field(default_factory=dict)
    """By reference: the submitted call, its attempt on this actor, its deadline."""

    def has_capacity(self, max_concurrency: int) -> bool:
        """Whether the actor can take another call."""
        return self.building is None and not self.failed and len(self.running) < max_concurrency


def too_many_starts(
    pool: str, tries: int, max_restarts: int, error: WorkerDiedError | DeadlineExceededError
) -> WorkerDiedError | DeadlineExceededError:
    """The error of an actor whose start failed too often; contains the last error."""
    return type(error)(
        f"pool '{pool}': building the actor failed {tries} {'time' if tries == 1 else 'times, each in a fresh process'} "
        f"(max_restarts={max_restarts}); the last error:\n{error}"
    )
