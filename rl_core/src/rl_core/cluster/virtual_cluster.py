"""Reserves bundles of CPUs and GPUs on the nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.cluster import daemons
from rl_core.cluster.placement import Node, Request, insufficient, plan
from rl_core.cluster.ray_runtime import RayLease, live_nodes
from rl_core.cluster.worker_group import WorkerGroup
from rl_core.errors import ResourceInsufficientError, UserError
from rl_core.rendezvous.interfaces import free_port

_SETTLE_S = 5.0  # Ray frees resources a moment after a shutdown
_PLACE_S = 120.0  # on a busy machine, Ray may take half a minute to start a process


@dataclass(frozen=True)
class Bundle:
    """One rank's share of a node: bundle `index` of Ray's placement group `group`, on the node with index `node_rank`.

    If the node dies, Ray moves the group to another one that has room, or waits until one joins; `node` is then the first one.
    """

    group: PlacementGroup
    index: int
    node: Node
    node_rank: int


class RayVirtualCluster(AbstractContextManager["RayVirtualCluster"]):
    """Bundles, one per rank, on the nodes of a Ray cluster.

    Joins the Ray of this process or of RAY_ADDRESS; without either, starts one on this machine, on the loopback
    interface, which ends with the cluster.

    Args:
        bundle_ct_per_node_list: Ranks on each node: [8, 8] is two different nodes with eight each.
        use_gpus: Whether each bundle has a GPU; None uses GPUs if there are any, else CPUs.
        max_colocated_worker_groups: Number of worker groups that may share a bundle. Each gets that fraction of it,
            but all its threads, because their phases alternate.
        cpus_per_bundle: CPUs reserved for a bundle, and its number of threads; None reserves one, with an equal
            share of the node as threads.
        name: Name of the cluster in errors.
        seed: Random seed of the worker processes.

    Raises:
        ResourceInsufficientError: Immediately if the nodes are too few or too small, and after a few seconds if the
            missing resources are in use.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool | None = None,
        max_colocated_worker_groups: int = 1,
        cpus_per_bundle: float | None = None,
        name: str = "",
        seed: int = 0,
    ) -> None:
        if max_colocated_worker_groups < 1:
            raise UserError(f"max_colocated_worker_groups={max_colocated_worker_groups} must be at least 1")
        self.name = name or "cluster"
        self.seed = seed
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self._cpus = cpus_per_bundle
        self.tenants: list[WorkerGroup] = []
        self._groups: list[PlacementGroup] = []
        self.bundles: list[Bundle] = []  # in rank order
        self._lease = RayLease()
        try:
            request = Request.of(bundle_ct_per_node_list, live_nodes(), cpus=cpus_per_bundle, use_gpus=use_gpus)
            self.use_gpus = request.gpus_per_bundle > 0
            self._place(request, _choose_nodes(request))
        except BaseException:
            self.shutdown()
            raise

    def world_size(self) -> int:
        """Number of bundles, and thus the maximum number of ranks of a group."""
        return len(self.bundles)

    def threads_of(self, bundle: Bundle) -> int:
        """Threads that a worker in this bundle may use."""
        if self._cpus is not None:
            return max(1, int(self._cpus))
        neighbours = sum(other.node.node_id == bundle.node.node_id for other in self.bundles)
        return max(1, int(bundle.node.cpus) // neighbours)

    def worker_share(self) -> dict[str, float]:
        """Ray resource options of one worker: its fraction of a bundle."""
        share = 1.0 / self.max_colocated_worker_groups
        return {"num_cpus": share * (1.0 if self._cpus is None else self._cpus), "num_gpus": share if self.use_gpus else 0.0}

    def get_master_address_and_port(self) -> tuple[str, int]:
        """The address of rank 0's node, and a port that is free there and was not returned before."""
        node = self.bundles[0].node
        if node.node_id == ray.get_runtime_context().get_node_id():
            return node.address, free_port()
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        find = ray.remote(free_port).options(num_cpus=0, scheduling_strategy=there)
        return node.address, int(ray.get(find.remote(), timeout=_PLACE_S))

    def attach(self, tenant: WorkerGroup, name: str) -> None:
        """Reserve a share of the bundles for a worker group.

        Raises:
            ResourceInsufficientError: `max_colocated_worker_groups` groups already share the cluster.
        """
        if not self.bundles:
            raise UserError(f"{self.name} was shut down; create a new one for '{name}'")
        if len(self.tenants) >= self.max_colocated_worker_groups:
            raise ResourceInsufficientError(
                f"worker group '{name}' does not fit in {self.name}, which already has max_colocated_worker_groups="
                f"{self.max_colocated_worker_groups} groups. Shut one down, or create the "
                f"cluster with max_colocated_worker_groups={self.max_colocated_worker_groups + 1}."
            )
        self.tenants.append(tenant)

    def detach(self, tenant: WorkerGroup) -> None:
        """Release the share. Idempotent."""
        with suppress(ValueError):
            self.tenants.remove(tenant)

    def shutdown(self) -> None:
        """Shut down the worker groups, free the bundles, and stop Ray if it was started here. Idempotent."""
        for tenant in list(self.tenants):
            tenant.shutdown()
        groups, self._groups, self.bundles = self._groups, [], []
        if ray.is_initialized() and not daemons.is_dead():
            for group in groups:
                remove_placement_group(group)
        self._lease.release()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def _place(self, request: Request, nodes: Sequence[Node]) -> None:
        resources = {"CPU": request.cpus_per_bundle, **({"GPU": request.gpus_per_bundle} if self.use_gpus else {})}
        for count, node in zip(request.entries, nodes, strict=True):
            # Each on its planned node, so that ranks are in order; if it dies, on any that has no other entry.
            others = ",".join(other.node_id for other in nodes if other is not node)
            selector = {"ray.io/node-id": f"!in({others})"} if others else {}
            group = placement_group(
                [resources] * count,
                strategy="STRICT_PACK",
                _soft_target_node_id=node.node_id,
                bundle_label_selector=[selector] * count,
            )
            self._groups.append(group)
        for node_rank, (count, group, node) in enumerate(zip(request.entries, self._groups, nodes, strict=True)):
            if not group.wait(_PLACE_S) or set(placement_group_table(group)["bundles_to_node_id"].values()) != {node.node_id}:
                raise insufficient(request, live_nodes(), free=True)
            self.bundles += [Bundle(group, at, node, node_rank) for at in range(count)]


def _choose_nodes(request: Request) -> list[Node]:
    nodes = live_nodes()
    if plan(request, nodes, free=False) is None:
        raise insufficient(request, nodes, free=False)
    until = time.monotonic() + _SETTLE_S
    while (chosen := plan(request, nodes, free=True)) is None:
        if time.monotonic() > until:
            raise insufficient(request, nodes, free=True)
        time.sleep(0.1)
        nodes = live_nodes()
    return chosen
