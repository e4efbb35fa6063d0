"""What `/health` reports: whether the replicas of an engine or the backend of a proxy answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rl_core.dispatch.generation import DistributedGeneration
from rl_core.errors import UserError, WorkerDiedError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.worker import GenerationWorker

_ANSWER_S = 0.5
"""How long replicas may take to check their processes; one that is busy for longer counts as alive."""

ResultT = TypeVar("ResultT")


class SharedCheck(Generic[ResultT]):
    """Answers requests that arrive during a check with its result: `/health` needs no key, and a check may take long.

    Args:
        check: the check.
    """

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
    if not isinstance(generation, DistributedGeneration):
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


def _check_processes(generation: DistributedGeneration) -> None:
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
