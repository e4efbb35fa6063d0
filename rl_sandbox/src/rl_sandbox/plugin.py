"""Registers the local sandbox by import path."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_sandboxes() -> list[Component]:
    """The sandbox on the machine of the worker."""
    return [
        Component(
            "local",
            target="rl_sandbox.local:LocalSandbox",
            summary="Model-written programs on this machine, isolated by bubblewrap, cgroups and resource limits",
        )
    ]
