"""The bundles of a cluster that each rank of a group has, and the GPUs that it sees by them; starts no worker.

A worker whose engine runs several processes of its own (tensor parallel sampling) needs the GPUs of several bundles. Its own
process is in the first; in each of the others a process that does nothing holds the GPU's share and says which GPU that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster.remote_actor import ActorCall, RemoteActor, wait_gone
from rl_core.cluster.virtual_cluster import Bundle, RayVirtualCluster
from rl_core.errors import ResourceInsufficientError


class BundleAllocator:
    """Bundles by rank: rank i has `per_worker` of them, side by side, from `i * per_worker` on.

    Args:
        cluster: whose bundles.
        per_worker: bundles of a rank.
        num_workers: ranks.

    Raises:
        ResourceInsufficientError: there are too few bundles, or those of one rank lie on several nodes.
    """

    def __init__(self, cluster: RayVirtualCluster, *, per_worker: int, num_workers: int) -> None:
        self._cluster, self._per_worker = cluster, per_worker
        self._holders: dict[int, list[RemoteActor]] = {}
        if num_workers * per_worker > cluster.world_size():
            each = f" of {per_worker} bundles each" if per_worker > 1 else ""
            raise ResourceInsufficientError(
                f"{num_workers} workers{each} were asked for, but {cluster.name} has {cluster.world_size()} bundles. Change: a "
                f"larger bundle_ct_per_node_list, or at most {cluster.world_size() // per_worker} workers."
            )
        for rank in range(num_workers):
            nodes = {bundle.node.node_id for bundle in self._all(rank)}
            if len(nodes) > 1:
                raise ResourceInsufficientError(
                    f"The {per_worker} bundles of worker {rank} lie on {len(nodes)} nodes, and its processes need one. Change: "
                    f"give every node of {cluster.name} a multiple of {per_worker} bundles."
                )

    def first(self, rank: int) -> Bundle:
        """The bundle that the rank's process is in."""
        return self._all(rank)[0]

    def hold(self, rank: int, *, share: Mapping[str, float], runtime_env: Mapping[str, Any], name: str) -> list[ActorCall]:
        """Begin to hold the rank's other GPUs, where it has any and nobody holds them yet."""
        if self._per_worker == 1 or not self._cluster.use_gpus or rank in self._holders:
            return []
        self._holders[rank] = [
            RemoteActor(
                f"place {place} of rank {rank} of '{name}'",
                options={**share, "scheduling_strategy": strategy_of(bundle)},
                env={},
                runtime_env=runtime_env,
            )
            for place, bundle in enumerate(self._all(rank)[1:], 1)
        ]
        return [holder.started() for holder in self._holders[rank]]

    def visible_gpus(self, rank: int, own: RemoteActor) -> dict[str, str]:
        """The variable that shows the rank's process all of its GPUs; nothing where Ray's own is right."""
        holders = self._holders.get(rank)
        if not holders:
            return {}
        seen = [actor.identity.visible_gpus for actor in (own, *holders) if actor.identity is not None]
        return {"CUDA_VISIBLE_DEVICES": ",".join(seen)}

    def give_back(self) -> None:
        """End the processes that hold GPUs; calling it twice is fine."""
        holders = [holder for several in self._holders.values() for holder in several]
        self._holders = {}
        for holder in holders:
            holder.kill()
        wait_gone(holders)

    def _all(self, rank: int) -> Sequence[Bundle]:
        return self._cluster.bundles[rank * self._per_worker : (rank + 1) * self._per_worker]


def strategy_of(bundle: Bundle) -> PlacementGroupSchedulingStrategy:
    """What puts a process into a bundle."""
    return PlacementGroupSchedulingStrategy(placement_group=bundle.group, placement_group_bundle_index=bundle.index)
