"""Processes, placement and deadlines; the only rooms that import Ray.

The names below are loaded when they are first used, so that `import rl_core.cluster` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.cluster.actor_pool import ActorPool, InProcessPool, Pool
    from rl_core.cluster.deadlines import Deadlines
    from rl_core.cluster.in_process import InProcessWorkerGroup
    from rl_core.cluster.ray_worker_group import RayWorkerGroup
    from rl_core.cluster.sharding import NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.cluster.worker_context import WorkerContext
    from rl_core.cluster.worker_group import PendingCall, WorkerGroup, wait_together

_ROOMS = {
    "ActorPool": "actor_pool",
    "Deadlines": "deadlines",
    "InProcessPool": "actor_pool",
    "InProcessWorkerGroup": "in_process",
    "NamedSharding": "sharding",
    "PendingCall": "worker_group",
    "Pool": "actor_pool",
    "RayVirtualCluster": "virtual_cluster",
    "RayWorkerGroup": "ray_worker_group",
    "WorkerContext": "worker_context",
    "WorkerGroup": "worker_group",
    "wait_together": "worker_group",
}

__all__ = [
    "ActorPool",
    "Deadlines",
    "InProcessPool",
    "InProcessWorkerGroup",
    "NamedSharding",
    "PendingCall",
    "Pool",
    "RayVirtualCluster",
    "RayWorkerGroup",
    "WorkerContext",
    "WorkerGroup",
    "wait_together",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
