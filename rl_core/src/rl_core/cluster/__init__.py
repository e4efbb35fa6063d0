"""Processes, placement and deadlines; the only package that imports Ray.

Names are imported on first use, so that `import rl_core.cluster` is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_core.cluster.in_process import InProcessWorkerGroup as InProcessWorkerGroup
    from rl_core.cluster.ray_worker_group import RayWorkerGroup as RayWorkerGroup
    from rl_core.cluster.sharding import NamedSharding as NamedSharding
    from rl_core.cluster.virtual_cluster import RayVirtualCluster as RayVirtualCluster
    from rl_core.cluster.worker_group import Deadlines as Deadlines
    from rl_core.cluster.worker_group import PendingCall as PendingCall
    from rl_core.cluster.worker_group import WorkerGroup as WorkerGroup
    from rl_core.interfaces.worker_context import WorkerContext as WorkerContext

__getattr__ = import_on_first_use(__name__)
