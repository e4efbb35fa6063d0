"""Processes, placement and deadlines; the only package that imports Ray.

Names are imported on first use, so that `import rl_core.cluster` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.cluster.deadlines import Deadlines
    from rl_core.cluster.in_process import InProcessWorkerGroup
    from rl_core.cluster.pending_call import PendingCall
    from rl_core.cluster.ray_worker_group import RayWorkerGroup
    from rl_core.cluster.sharding import NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.cluster.worker_group import WorkerGroup
    from rl_core.interfaces.worker_context import WorkerContext

_MODULE_OF = {
    "Deadlines": "rl_core.cluster.deadlines",
    "InProcessWorkerGroup": "rl_core.cluster.in_process",
    "NamedSharding": "rl_core.cluster.sharding",
    "PendingCall": "rl_core.cluster.pending_call",
    "RayVirtualCluster": "rl_core.cluster.virtual_cluster",
    "RayWorkerGroup": "rl_core.cluster.ray_worker_group",
    "WorkerContext": "rl_core.interfaces.worker_context",
    "WorkerGroup": "rl_core.cluster.worker_group",
}

__all__ = [
    "Deadlines",
    "InProcessWorkerGroup",
    "NamedSharding",
    "PendingCall",
    "RayVirtualCluster",
    "RayWorkerGroup",
    "WorkerContext",
    "WorkerGroup",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
