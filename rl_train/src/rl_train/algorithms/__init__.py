"""One readable module per algorithm, and the pure functions that they use."""

from rl_core.first_use import import_on_first_use

__all__ = [
    "BradleyTerryLossFn",
    "ClippedPGLossFn",
    "DPOLossFn",
    "DPOTrainer",
    "DistillationLossFn",
    "DistillationTrainer",
    "GRPOLossFn",
    "GRPOTrainer",
    "KTOLossFn",
    "KTOTrainer",
    "MseValueLossFn",
    "NLLLossFn",
    "PPOTrainer",
    "PreferenceLossFn",
    "RewardModelTrainer",
    "SFTTrainer",
]

__getattr__ = import_on_first_use(
    __name__,
    {
        ".losses.policy_gradient": "ClippedPGLossFn GRPOLossFn",
        ".losses.supervised": "BradleyTerryLossFn DPOLossFn KTOLossFn NLLLossFn PreferenceLossFn",
        "rl_train.trainers.trainers": (
            "DPOTrainer DistillationTrainer GRPOTrainer KTOTrainer PPOTrainer RewardModelTrainer SFTTrainer"
        ),
        ".losses.distillation": "DistillationLossFn",
        ".losses.value": "MseValueLossFn",
    },
)
