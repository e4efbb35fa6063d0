"""What a backend, an environment, a loss, a dataset or a logger must be; no logic."""

from rl_core.interfaces.dataset import Dataset, Record
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.generation import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec
from rl_core.interfaces.logger import Logger
from rl_core.interfaces.loss import LossFunction, LossType
from rl_core.interfaces.policy import (
    ColocatablePolicyInterface,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
    TopkLogprobOutputSpec,
)
from rl_core.interfaces.trainable import TrainableInterface
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
    "Logger",
    "LogprobOutputSpec",
    "LossFunction",
    "LossType",
    "PolicyInterface",
    "Record",
    "ReferenceLogprobOutputSpec",
    "TopkLogprobOutputSpec",
    "TrainableInterface",
    "ValueInterface",
    "ValueOutputSpec",
    "WeightTransport",
]
