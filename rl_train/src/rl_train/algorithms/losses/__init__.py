"""Losses on log-probabilities or values, independent of logits, ranks and packing."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "BradleyTerryLossConfig": "reward_config",
    "BradleyTerryLossFn": "reward",
    "ClippedPGLossConfig": "config",
    "GRPOLossConfig": "config",
    "NLLLossConfig": "config",
    "ClippedPGLossFn": "policy_gradient",
    "GRPOLossFn": "policy_gradient",
    "MseValueLossConfig": "value_config",
    "MseValueLossFn": "value",
    "NLLLossFn": "nll",
    "DistillationLossConfig": "distillation_config",
    "DistillationLossFn": "distillation",
    "DPOLossConfig": "preference_config",
    "PreferenceLossConfig": "preference_config",
    "DPOLossFn": "preference",
    "PreferenceLossFn": "preference",
}

__all__ = [
    "BradleyTerryLossConfig",
    "BradleyTerryLossFn",
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossFn",
    "GRPOLossConfig",
    "GRPOLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossConfig",
    "NLLLossFn",
    "PreferenceLossConfig",
    "PreferenceLossFn",
]


def __getattr__(name: str) -> Any:
    """Import on first use: reading a config must not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
