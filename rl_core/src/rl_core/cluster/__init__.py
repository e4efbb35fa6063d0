"""Processes, placement and deadlines; the only package that imports Ray.

Names are imported on first use, so that `import rl_core.cluster` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_core.cluster.deadlines import Deadlines
    from rl_core.cluster.in_process import InProcessWorkerGroup
    from rl_core.cluster.pending_call import PendingCall
    from rl_core.cluster.ray_worker_group import RayWorkerGroup
    from rl_core.cluster.sharding import NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.cluster.worker_group import WorkerGroup
    from rl_core.interfaces.worker_context import WorkerContext


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

__getattr__ = import_on_first_use(__name__)
