"""What a backend, an environment, a loss, a dataset or a logger must be; no logic.

The names below are loaded when they are first used, so that importing a module of this package does not import torch.
"""

from __future__ import annotations

import warnings
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
    from rl_core.interfaces.trainable import TrainableInterface, TrainingDatumSpec
    from rl_core.interfaces.value import ValueInterface, ValueOutputSpec
    from rl_core.interfaces.weights import WeightTransport

_NAMES = {
    "dataset": ["Dataset", "Record"],
    "environment": ["EnvironmentInterface", "EnvironmentReturn"],
    "generation": ["GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec"],
    "loss": ["LossFunction", "LossType"],
    "messages": ["ImagePart", "Message", "PartsMessage", "TextPart", "ToolCall", "ToolSpec"],
    "policy": [
        "ColocatablePolicyInterface",
        "LogprobOutputSpec",
        "LogprobsSpec",
        "PolicyInterface",
        "ReferenceLogprobOutputSpec",
        "TopkLogprobOutputSpec",
    ],
    "trainable": ["TrainableInterface", "TrainingDatumSpec"],
    "value": ["ValueInterface", "ValueOutputSpec"],
    "weights": ["WeightTransport"],
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_MOVED = {"Tool": "rl_core.tools.specs", "ToolEnvironment": "rl_core.tools.environment"}

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


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"{__name__}.{name} has moved to rl_core.tools.", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
