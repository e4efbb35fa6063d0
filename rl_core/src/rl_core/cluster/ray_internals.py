"""What this package uses of Ray beyond its public interface; the only module here with such names (docs/compatibility.md)."""

from __future__ import annotations

from typing import Any

from ray._private import node, ray_constants, services, state, utils, worker

__all__ = ["node", "ray_constants", "services", "state", "utils", "worker"]


def connected_node() -> Any:
    """Ray's record of the node that this process is connected to."""
    return worker._global_node


def decorator_options(wrapped_class: Any) -> dict[str, Any]:
    """The arguments of the `@ray.remote(...)` that wraps a class."""
    return dict(wrapped_class._default_options)
