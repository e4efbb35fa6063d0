"""Workers of one kind, in this process or over a cluster; the choice is made here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.sharding import NamedSharding
from rl_core.cluster.worker_group import WorkerGroup
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


def make_group(
    worker_class: type,
    *,
    config: Any,
    cluster: RayVirtualCluster | None,
    num_workers: int | None,
    name: str,
    sharding: NamedSharding | None = None,
    python: str | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Start workers that take (`context`, `config`).

    Raises:
        ConfigError: more than one rank, or an interpreter of its own, was asked of a single process.
    """
    if cluster is None:
        if (num_workers or 1) > 1 or python is not None:
            raise ConfigError(
                f"The {name} asks for {num_workers or 1} workers{' and its own interpreter' if python else ''}, but runs in "
                "this process. Give it a cluster: `cluster.backend: ray`, or `cluster=RayVirtualCluster([...])` from Python."
            )
        return InProcessWorkerGroup(worker_class, worker_kwargs={"config": config}, sharding=sharding, name=name)
    from rl_core.cluster.ray_worker_group import RayWorkerGroup

    return RayWorkerGroup(
        cluster,
        worker_class,
        worker_kwargs={"config": config},
        sharding=sharding,
        num_workers=num_workers,
        name=name,
        python=python,
        env_vars=env_vars,
    )
