"""Pauses sampling while weights are updated: running requests finish, new ones are refused until the server resumes.

A pause has a lease. The client that updates the weights renews it; if that client exits, the lease expires and others can use
the server again. `/health` reports a pause, and whether the replicas of the engine or the backend of a proxy answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from rl_core.dispatch.facades import GenerationFacade
from rl_core.errors import UserError, WorkerDiedError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.worker import GenerationWorker
from rl_serve.errors import ApiError

_RETRY_AFTER_S = 1


class Pause:
    """Whether the server is paused, and the number of requests that run.

    Args:
        clock: the time in seconds, by which leases end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        self._clock = clock
        self._is_paused = False
        self._lease_s = self._ends = 0.0
        self._starting: set[object] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_active(self) -> bool:
        """Whether requests are refused: in a pause, and while one waits for running requests."""
        return self._is_paused or bool(self._starting)

    @property
    def is_held(self) -> bool:
        """Whether no request runs and the lease has not expired."""
        return self._is_paused and self._clock() < self._ends

    @property
    def is_expired(self) -> bool:
        """Whether the lease of a pause has expired."""
        return self._is_paused and not self._starting and not self.is_held

    def enter(self) -> None:
        """Count a request that starts.

        Raises:
            ApiError: the server is paused.
        """
        if self.is_active:
            raise ApiError(
                503,
                f"The server is paused while its weights are updated. Try again in {_RETRY_AFTER_S} s.",
                code="paused",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request that has ended."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def start(self, *, timeout_s: float, lease_s: float = 60.0) -> None:
        """Refuse new requests and wait until the running ones have ended; the lease begins then, also that of a repeated call.

        Raises:
            ApiError: some did not end in time, or `end` was called meanwhile; the server is then not paused by this call.
        """
        this = object()
        self._starting.add(this)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            if this not in self._starting:
                raise ApiError(409, "The server was resumed before the pause began. Send /pause again.", code="resumed")
            self._is_paused, self._lease_s = True, lease_s
            self.renew()
        except TimeoutError:
            raise ApiError(503, f"{self.running} requests still run after {timeout_s:g} s.", code="busy") from None
        finally:
            self._starting.discard(this)

    def renew(self) -> None:
        """Begin the lease again."""
        self._ends = self._clock() + self._lease_s

    def end(self) -> None:
        """Accept requests again; a pause that still waits for running requests does not begin."""
        self._is_paused = False
        self._starting.clear()


class PauseMiddleware:
    """ASGI middleware that counts sampling requests and refuses them in a pause, except those of `open_paths`.

    `end_expired` ends a pause whose lease has expired.
    """

    def __init__(
        self, app: ASGIApp, *, pause: Pause, end_expired: Callable[[], Awaitable[None]], open_paths: Collection[str]
    ) -> None:
        self._app, self._pause, self._end_expired, self._open_paths = app, pause, end_expired, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            await self._end_expired()
            self._pause.enter()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._pause.leave()


_ANSWER_S = 0.5
"""How long replicas may take to check their processes; one that is busy for longer counts as alive."""
ResultT = TypeVar("ResultT")


class SharedCheck(Generic[ResultT]):
    """Answers requests that arrive during a check with its result: `/health` needs no key, and a check may take long."""

    def __init__(self, check: Callable[[], Awaitable[ResultT]]) -> None:
        self._check = check
        self._running: asyncio.Future[ResultT] | None = None

    async def result(self) -> ResultT:
        """The result of the check that runs, or of a new one.

        Raises:
            Exception: whatever the check raises.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._check())
        return await asyncio.shield(self._running)


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What `/health` reports about an engine."""

    status: Literal["ok", "degraded", "engine failed", "paused", "updating", "unhealthy"]
    """`degraded` if some replicas are dead or have no weights, `engine failed` if all are. `unhealthy` if an update of the
    weights was interrupted, so that they are incomplete."""
    reason: str = ""

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return self.status in ("ok", "degraded")


def read_engine_state(generation: GenerationInterface, death: Exception | None = None) -> EngineState:
    """The state of an engine; a dead replica that may be restarted counts as alive, because the next request restarts it.

    May wait for Ray if replicas run on other hosts.

    Args:
        generation: the engine.
        death: the exit of a process of the engine, if its last request failed with it.
    """
    if not isinstance(generation, GenerationFacade):
        return EngineState(status="ok") if death is None else EngineState(status="engine failed", reason=str(death))
    _check_processes(generation)
    alive = generation.group.workers_alive()
    empty = [rank for rank, is_alive in enumerate(alive) if is_alive and generation.lacks_weights(rank)]
    dead, limit = alive.count(False), generation.config.max_restarts
    reasons = []
    if dead and generation.restarts + dead > limit:
        reasons.append(
            f"{dead} of {len(alive)} generation replicas exited, and policy.generation.max_restarts ({limit}) does not allow "
            "another restart. Check the log of the server and restart it."
        )
    elif dead and death is not None:
        reasons.append(f"{dead} of {len(alive)} generation replicas exited, and restarting them failed: {death}")
    if empty:
        reasons.append(
            f"Generation replica {', '.join(map(str, empty))} was restarted and has not received the weights of the run yet. "
            "If this lasts, check the log of the server and restart it."
        )
    if not reasons:
        return EngineState(status="ok")
    return EngineState(
        status="degraded" if alive.count(True) > len(empty) else "engine failed",
        reason=" ".join(reasons),
    )


def _check_processes(generation: GenerationFacade) -> None:
    """Let the replicas check the processes of their engines: the group counts a replica that misses one as dead."""
    default = GenerationWorker.check_processes
    if getattr(generation.worker_class, "check_processes", default) is default:
        return
    group = generation.group
    try:
        alive = [rank for rank, is_alive in enumerate(group.workers_alive()) if is_alive]
        calls = [group.submit_one("check_processes", rank=rank) for rank in alive]
    except UserError:  # the engine was shut down, or another thread is restarting its only replica
        return
    until = time.monotonic() + _ANSWER_S
    for call in calls:
        with suppress(WorkerDiedError):  # `workers_alive` reports it from now on
            call.poll(max(until - time.monotonic(), 0.0))
