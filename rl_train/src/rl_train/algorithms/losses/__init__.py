"""Losses on log-probabilities or values, independent of logits, ranks and packing."""

from rl_core.first_use import import_on_first_use

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

__getattr__ = import_on_first_use(
    __name__,
    {
        ".reward_config": "BradleyTerryLossConfig",
        ".reward": "BradleyTerryLossFn",
        ".config": "ClippedPGLossConfig GRPOLossConfig NLLLossConfig",
        ".policy_gradient": "ClippedPGLossFn GRPOLossFn",
        ".value_config": "MseValueLossConfig",
        ".value": "MseValueLossFn",
        ".nll": "NLLLossFn",
        ".distillation_config": "DistillationLossConfig",
        ".distillation": "DistillationLossFn",
        ".preference_config": "DPOLossConfig PreferenceLossConfig",
        ".preference": "DPOLossFn PreferenceLossFn",
    },
)
