"""One readable page per algorithm, and the pure functions that they lean on."""

from importlib import import_module
from typing import Any

_HOMES = {
    "ClippedPGLossFn": "losses.policy_gradient",
    "DPOLossFn": "losses.preference",
    "GRPOLossFn": "losses.policy_gradient",
    "NLLLossFn": "losses.nll",
    "PreferenceLossFn": "losses.preference",
}

__all__ = ["ClippedPGLossFn", "DPOLossFn", "GRPOLossFn", "NLLLossFn", "PreferenceLossFn"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading an algorithm's config must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
