"""Whether the replicas of a served engine are alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.dispatch.generation import DistributedGeneration
from rl_core.interfaces.generation import GenerationInterface


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What `/health` reports about an engine."""

    status: Literal["ok", "degraded", "engine failed"]
    """`degraded` if some replicas are dead, `engine failed` if all are."""
    reason: str = ""


def read_engine_state(generation: GenerationInterface) -> EngineState:
    """The state of an engine; a dead replica that may be restarted counts as alive, because the next request restarts it.

    May wait for Ray if replicas run on other hosts.
    """
    if not isinstance(generation, DistributedGeneration):
        return EngineState(status="ok")
    alive = generation.group.workers_alive()
    dead, limit = alive.count(False), generation.config.max_restarts
    if dead == 0 or generation.restarts + dead <= limit:
        return EngineState(status="ok")
    return EngineState(
        status="degraded" if any(alive) else "engine failed",
        reason=f"{dead} of {len(alive)} generation replicas exited, and policy.generation.max_restarts ({limit}) does not "
        "allow another restart. Check the log of the server and restart it.",
    )
