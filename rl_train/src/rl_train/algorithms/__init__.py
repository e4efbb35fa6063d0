"""One readable module per algorithm, and the pure functions that they use."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "BradleyTerryLossFn": f"{__name__}.losses.reward",
    "ClippedPGLossFn": f"{__name__}.losses.policy_gradient",
    "DPOLossFn": f"{__name__}.losses.preference",
    # Exported here under familiar names; defined in `trainers`, which may import all components.
    "DPOTrainer": "rl_train.trainers.trainers",
    "DistillationLossFn": f"{__name__}.losses.distillation",
    "DistillationTrainer": "rl_train.trainers.trainers",
    "GRPOLossFn": f"{__name__}.losses.policy_gradient",
    "GRPOTrainer": "rl_train.trainers.trainers",
    "MseValueLossFn": f"{__name__}.losses.value",
    "NLLLossFn": f"{__name__}.losses.nll",
    "PPOTrainer": "rl_train.trainers.trainers",
    "PreferenceLossFn": f"{__name__}.losses.preference",
    "RewardModelTrainer": "rl_train.trainers.trainers",
    "SFTTrainer": "rl_train.trainers.trainers",
}

__all__ = [
    "BradleyTerryLossFn",
    "ClippedPGLossFn",
    "DPOLossFn",
    "DPOTrainer",
    "DistillationLossFn",
    "DistillationTrainer",
    "GRPOLossFn",
    "GRPOTrainer",
    "MseValueLossFn",
    "NLLLossFn",
    "PPOTrainer",
    "PreferenceLossFn",
    "RewardModelTrainer",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    """Import on first use: reading an algorithm's config must not import torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
