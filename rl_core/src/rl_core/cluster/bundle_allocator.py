"""Assigns bundles of a cluster to the ranks of a group, and determines the GPUs that each rank sees.

A worker whose engine runs several processes (tensor-parallel sampling) needs the GPUs of several bundles. Its own process runs
in the first; in each of the others an idle process reserves the GPU and reports which GPU it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster.remote_actor import ActorCall, RemoteActor, wait_exited
from rl_core.cluster.virtual_cluster import Bundle, RayVirtualCluster
from rl_core.errors import ResourceInsufficientError


class BundleAllocator:
    """Bundles by rank: rank i has `per_worker` consecutive bundles, starting at `i * per_worker`.

    Raises:
        ResourceInsufficientError: there are too few bundles, or those of one rank are on several nodes.
    """

    def __init__(self, cluster: RayVirtualCluster, *, per_worker: int, num_workers: int) -> None:
        self._cluster, self._per_worker = cluster, per_worker
        self._holders: dict[int, list[RemoteActor]] = {}
        if num_workers * per_worker > cluster.world_size():
            each = f" of {per_worker} bundles each" if per_worker > 1 else ""
            raise ResourceInsufficientError(
                f"{num_workers} workers{each} were requested, but {cluster.name} has {cluster.world_size()} bundles. Use a "
                f"larger bundle_ct_per_node_list, or at most {cluster.world_size() // per_worker} workers."
            )
        for rank in range(num_workers):
            nodes = {bundle.node.node_id for bundle in self._all(rank)}
            if len(nodes) > 1:
                raise ResourceInsufficientError(
                    f"The {per_worker} bundles of worker {rank} are on {len(nodes)} nodes, but must be on one. "
                    f"Give every node of {cluster.name} a multiple of {per_worker} bundles."
                )

    def own_bundle(self, rank: int) -> Bundle:
        """The bundle of the rank's own process."""
        return self._all(rank)[0]

    def reserve(self, rank: int, *, share: Mapping[str, float], runtime_env: Mapping[str, Any], name: str) -> list[ActorCall]:
        """Start reserving the rank's other GPUs, if it has any that are not reserved yet."""
        if self._per_worker == 1 or not self._cluster.use_gpus or rank in self._holders:
            return []
        self._holders[rank] = [
            RemoteActor(
                f"GPU {gpu} of rank {rank} of '{name}'",
                options={**share, "scheduling_strategy": scheduling_strategy(bundle)},
                env={},
                runtime_env=runtime_env,
            )
            for gpu, bundle in enumerate(self._all(rank)[1:], 1)
        ]
        return [holder.started() for holder in self._holders[rank]]

    def visible_gpus(self, rank: int, own: RemoteActor) -> dict[str, str]:
        """The environment variable that makes all GPUs of the rank visible; empty if Ray's own value is correct."""
        holders = self._holders.get(rank)
        if not holders:
            return {}
        device_lists = [actor.identity.visible_gpus for actor in (own, *holders) if actor.identity is not None]
        return {"CUDA_VISIBLE_DEVICES": ",".join(device_lists)}

    def release(self) -> None:
        """Stop the processes that reserve GPUs; calling it twice is fine."""
        holders = [holder for several in self._holders.values() for holder in several]
        self._holders = {}
        for holder in holders:
            holder.kill()
        wait_exited(holders)

    def _all(self, rank: int) -> Sequence[Bundle]:
        return self._cluster.bundles[rank * self._per_worker : (rank + 1) * self._per_worker]


def scheduling_strategy(bundle: Bundle) -> PlacementGroupSchedulingStrategy:
    """The scheduling strategy that places a process in a bundle."""
    return PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.index)
