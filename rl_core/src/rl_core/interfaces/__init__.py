"""What a backend, an environment, a loss, a dataset or a logger must be; no logic.

The names below are loaded when they are first used, so that importing a module of this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from rl_core.interfaces.tool_environment import ToolEnvironment
    from rl_core.interfaces.tool_specs import Tool
    from rl_core.interfaces.trainable import TrainableInterface, TrainingDatumSpec
    from rl_core.interfaces.value import ValueInterface, ValueOutputSpec
    from rl_core.interfaces.weights import WeightTransport

_MODULE_OF = {
    "ColocatablePolicyInterface": "rl_core.interfaces.policy",
    "Dataset": "rl_core.interfaces.dataset",
    "EnvironmentInterface": "rl_core.interfaces.environment",
    "EnvironmentReturn": "rl_core.interfaces.environment",
    "GenerationDatumSpec": "rl_core.interfaces.generation",
    "GenerationInterface": "rl_core.interfaces.generation",
    "GenerationOutputSpec": "rl_core.interfaces.generation",
    "ImagePart": "rl_core.interfaces.messages",
    "LogprobOutputSpec": "rl_core.interfaces.policy",
    "LogprobsSpec": "rl_core.interfaces.policy",
    "LossFunction": "rl_core.interfaces.loss",
    "LossType": "rl_core.interfaces.loss",
    "Message": "rl_core.interfaces.messages",
    "PartsMessage": "rl_core.interfaces.messages",
    "PolicyInterface": "rl_core.interfaces.policy",
    "Record": "rl_core.interfaces.dataset",
    "ReferenceLogprobOutputSpec": "rl_core.interfaces.policy",
    "TextPart": "rl_core.interfaces.messages",
    "Tool": "rl_core.interfaces.tool_specs",
    "ToolCall": "rl_core.interfaces.messages",
    "ToolEnvironment": "rl_core.interfaces.tool_environment",
    "ToolSpec": "rl_core.interfaces.messages",
    "TopkLogprobOutputSpec": "rl_core.interfaces.policy",
    "TrainableInterface": "rl_core.interfaces.trainable",
    "TrainingDatumSpec": "rl_core.interfaces.trainable",
    "ValueInterface": "rl_core.interfaces.value",
    "ValueOutputSpec": "rl_core.interfaces.value",
    "WeightTransport": "rl_core.interfaces.weights",
}

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
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolSpec",
    "TopkLogprobOutputSpec",
    "TrainableInterface",
    "TrainingDatumSpec",
    "ValueInterface",
    "ValueOutputSpec",
    "WeightTransport",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
