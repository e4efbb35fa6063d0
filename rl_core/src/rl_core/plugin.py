"""Registers the built-in weight transports through the same hook as every plugin; strings only."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_weight_transports() -> list[Component]:
    """Transports within a process, within a node, between processes of a group, and by files."""
    return [
        Component(
            "by_reference",
            target="rl_core.weights.by_reference:ByReferenceTransport",
            summary="Policy and generation share a process and its tensors",
        ),
        Component(
            "shared_memory",
            target="rl_core.weights.shared_memory:SharedMemoryTransport",
            summary="Policy and generation on one node use shared memory",
        ),
        Component(
            "collective",
            target="rl_core.weights.collective:CollectiveTransport",
            summary="Broadcast over a process group, gloo or NCCL",
        ),
        Component("disk", target="rl_core.weights.disk:DiskTransport", summary="Files in a folder that both sides can access"),
    ]
