"""Assigns the entries of a cluster to nodes, or reports why they do not fit; arithmetic only, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.errors import ResourceInsufficientError, UserError


@dataclass(frozen=True, kw_only=True)
class Node:
    """Total and free resources of a node."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    def num_that_fit(self, request: Request, *, free: bool) -> int:
        """Number of bundles of the request that fit on this node, counting all of its resources or only the free ones."""
        cpus, gpus = (self.free_cpus, self.free_gpus) if free else (self.cpus, self.gpus)
        pairs = ((cpus, request.cpus_per_bundle), (gpus, request.gpus_per_bundle))
        return min(int(have / need + 1e-6) for have, need in pairs if need > 0)

    def __str__(self) -> str:
        return (
            f"{self.address} with {self.cpus:g} CPUs ({self.free_cpus:g} free) and {self.gpus:g} GPUs ({self.free_gpus:g} free)"
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """Bundles per entry, and resources per bundle."""

    entries: tuple[int, ...]
    cpus_per_bundle: float
    gpus_per_bundle: float

    @classmethod
    def of(cls, entries: Sequence[int], nodes: Sequence[Node], *, cpus: float | None, use_gpus: bool | None) -> Request:
        """Bundles of one CPU if `cpus` is None, each with a GPU if `use_gpus`, or if that is None and a node has GPUs."""
        gpus = any(node.gpus >= 1 for node in nodes) if use_gpus is None else use_gpus
        cpus = 1.0 if cpus is None else float(cpus)
        return cls(entries=tuple(entries), cpus_per_bundle=cpus, gpus_per_bundle=float(gpus))

    def __post_init__(self) -> None:
        if not self.entries or any(entry < 1 for entry in self.entries):
            raise UserError(
                f"bundle_ct_per_node_list={list(self.entries)} must name at least one node, each with at least one bundle"
            )
        if self.cpus_per_bundle <= 0:
            raise UserError(f"cpus_per_bundle={self.cpus_per_bundle} must be positive")

    def __str__(self) -> str:
        per_bundle = f"{self.cpus_per_bundle:g} CPU"
        if self.gpus_per_bundle:
            per_bundle += f" and {self.gpus_per_bundle:g} GPU"
        count = len(self.entries)
        return (
            f"bundle_ct_per_node_list={list(self.entries)}: {sum(self.entries)} bundles of {per_bundle} each on "
            f"{count} {'node' if count == 1 else 'nodes'}"
        )


def plan(request: Request, nodes: Sequence[Node], *, free: bool) -> list[Node] | None:
    """The node of each entry, in entry order, each a different one; None if they do not fit.

    The largest entry gets the node with the most capacity, which is optimal because all bundles are equal, so that a node's
    capacity is one number. Earlier nodes are preferred at equal capacity. `free` counts only resources that are free now.
    """
    room = {node.node_id: node.num_that_fit(request, free=free) for node in nodes}
    left = sorted(nodes, key=lambda node: -room[node.node_id])
    chosen: dict[int, Node] = {}
    for index in sorted(range(len(request.entries)), key=lambda at: -request.entries[at]):
        if not left or room[left[0].node_id] < request.entries[index]:
            return None
        chosen[index] = left.pop(0)
    return [chosen[index] for index in range(len(request.entries))]


def insufficient(request: Request, nodes: Sequence[Node], *, free: bool) -> ResourceInsufficientError:
    """The error for a request that no node can meet: what was requested, what is available, what to change."""
    there = "; ".join(str(node) for node in nodes) or "no node"
    count = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
    in_use = (
        "It would fit, but the missing resources are in use: shut down the other cluster or worker group first, "
        "or let groups share the bundles of one cluster (max_colocated_worker_groups=2)."
    )
    advice = in_use if free else _advice(request, nodes)
    return ResourceInsufficientError(f"Asked for {request}.\nRay has {count}: {there}.\n{advice}")


def _advice(request: Request, nodes: Sequence[Node]) -> str:
    rooms = sorted((room for node in nodes if (room := node.num_that_fit(request, free=False))), reverse=True)
    kind = "GPUs" if request.gpus_per_bundle else "CPUs"
    advice = []
    if rooms:
        advice.append(f"request at most bundle_ct_per_node_list={rooms}")
    if request.gpus_per_bundle:
        advice.append("use CPUs with use_gpus=False")
    elif request.cpus_per_bundle > 1:
        advice.append(f"lower cpus_per_bundle={request.cpus_per_bundle:g}")
    advice.append(f"or add nodes with more {kind} (`ray start --address=...`, then set RAY_ADDRESS)")
    return "Change: " + "; ".join(advice) + "."
