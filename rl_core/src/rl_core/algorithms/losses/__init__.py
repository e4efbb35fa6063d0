"""Losses over log-probabilities; they never see logits, ranks or packing."""

from typing import Any

_WHERE = {
    "ClippedPGLossConfig": "config",
    "GRPOLossConfig": "config",
    "NLLLossConfig": "config",
    "ClippedPGLossFn": "policy_gradient",
    "GRPOLossFn": "policy_gradient",
    "NLLLossFn": "nll",
}

__all__ = ["ClippedPGLossConfig", "ClippedPGLossFn", "GRPOLossConfig", "GRPOLossFn", "NLLLossConfig", "NLLLossFn"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading a config must not import torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
