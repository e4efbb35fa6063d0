"""One readable page per algorithm, and the pure functions that they lean on."""

from typing import Any

_LOSSES = ("ClippedPGLossFn", "GRPOLossFn", "NLLLossFn")

__all__ = ["ClippedPGLossFn", "GRPOLossFn", "NLLLossFn"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading an algorithm's config must not import torch."""
    if name not in _LOSSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_core.algorithms import losses

    return getattr(losses, name)
