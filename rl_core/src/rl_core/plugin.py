"""Registers the built-in weight transports through the hook that every plugin uses; strings only."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_weight_transports() -> list[Component]:
    """Within a process, within a node, between processes of a group."""
    return [
        Component(
            "by_reference",
            target="rl_core.weights.by_reference:ByReferenceTransport",
            summary="Policy and generation share a process and its tensors",
        ),
        Component(
            "shared_memory",
            target="rl_core.weights.shared_memory:SharedMemoryTransport",
            summary="Processes of one node read the same memory",
        ),
        Component(
            "collective",
            target="rl_core.weights.collective:CollectiveTransport",
            summary="Broadcast over a process group, gloo or NCCL",
        ),
        Component(
            "disk",
            target="rl_core.weights.disk:DiskTransport",
            summary="Files in a folder that both sides see",
        ),
    ]
