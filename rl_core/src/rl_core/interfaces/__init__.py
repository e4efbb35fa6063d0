"""What a backend, an environment, a loss, a dataset or a logger must be; no logic.

The names below are loaded when they are first used, so that importing a module of this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_core.interfaces.dataset import Dataset, Record
    from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
    from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
    from rl_core.interfaces.loss import LossFunction, LossType
    from rl_core.interfaces.messages import ImagePart, Message, PartsMessage, TextPart, ToolCall, ToolSpec
    from rl_core.interfaces.policy import (
        ColocatablePolicyInterface,
        LogprobOutputSpec,
        LogprobsSpec,
        PolicyInterface,
        ReferenceLogprobOutputSpec,
        TopkLogprobOutputSpec,
    )
    from rl_core.interfaces.trainable import TrainableInterface, TrainingDatumSpec
    from rl_core.interfaces.value import ValueInterface, ValueOutputSpec
    from rl_core.interfaces.weights import WeightTransport

__all__ = [
    "ColocatablePolicyInterface",
    "Dataset",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "ImagePart",
    "LogprobOutputSpec",
    "LogprobsSpec",
    "LossFunction",
    "LossType",
    "Message",
    "PartsMessage",
    "PolicyInterface",
    "Record",
    "ReferenceLogprobOutputSpec",
    "TextPart",
    "ToolCall",
    "ToolSpec",
    "TopkLogprobOutputSpec",
    "TrainableInterface",
    "TrainingDatumSpec",
    "ValueInterface",
    "ValueOutputSpec",
    "WeightTransport",
]

__getattr__ = import_on_first_use(
    __name__, moved={"rl_core.tools.specs": "Tool", "rl_core.tools.environment": "ToolEnvironment"}
)
