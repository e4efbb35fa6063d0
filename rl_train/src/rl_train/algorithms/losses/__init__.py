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
    "KTOLossConfig",
    "KTOLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossConfig",
    "NLLLossFn",
    "PreferenceLossConfig",
    "PreferenceLossFn",
    "calculate_kl",
]

__getattr__ = import_on_first_use(
    __name__,
    {
        ".config": "ClippedPGLossConfig DistillationLossConfig GRPOLossConfig MseValueLossConfig NLLLossConfig",
        ".preference_configs": "BradleyTerryLossConfig DPOLossConfig KTOLossConfig PreferenceLossConfig",
        ".kl": "calculate_kl",
        ".distillation": "DistillationLossFn",
        ".policy_gradient": "ClippedPGLossFn GRPOLossFn",
        ".supervised": "BradleyTerryLossFn DPOLossFn KTOLossFn NLLLossFn PreferenceLossFn",
        ".value": "MseValueLossFn",
    },
)
