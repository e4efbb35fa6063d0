"""What a backend, an environment, a loss, a dataset or a logger must be; no logic.

The names below are loaded when they are first used, so that importing a module of this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_core.interfaces.dataset import Dataset as Dataset
    from rl_core.interfaces.dataset import Record as Record
    from rl_core.interfaces.environment import EnvironmentInterface as EnvironmentInterface
    from rl_core.interfaces.environment import EnvironmentReturn as EnvironmentReturn
    from rl_core.interfaces.generation import GenerationDatumSpec as GenerationDatumSpec
    from rl_core.interfaces.generation import GenerationInterface as GenerationInterface
    from rl_core.interfaces.generation import GenerationOutputSpec as GenerationOutputSpec
    from rl_core.interfaces.loss import LossFunction as LossFunction
    from rl_core.interfaces.loss import LossType as LossType
    from rl_core.interfaces.messages import ImagePart as ImagePart
    from rl_core.interfaces.messages import Message as Message
    from rl_core.interfaces.messages import PartsMessage as PartsMessage
    from rl_core.interfaces.messages import TextPart as TextPart
    from rl_core.interfaces.messages import ToolCall as ToolCall
    from rl_core.interfaces.messages import ToolSpec as ToolSpec
    from rl_core.interfaces.policy import ColocatablePolicyInterface as ColocatablePolicyInterface
    from rl_core.interfaces.policy import LogprobOutputSpec as LogprobOutputSpec
    from rl_core.interfaces.policy import LogprobsSpec as LogprobsSpec
    from rl_core.interfaces.policy import PolicyInterface as PolicyInterface
    from rl_core.interfaces.policy import ReferenceLogprobOutputSpec as ReferenceLogprobOutputSpec
    from rl_core.interfaces.policy import TopkLogprobOutputSpec as TopkLogprobOutputSpec
    from rl_core.interfaces.trainable import TrainableInterface as TrainableInterface
    from rl_core.interfaces.trainable import TrainingDatumSpec as TrainingDatumSpec
    from rl_core.interfaces.trainable import ValueInterface as ValueInterface
    from rl_core.interfaces.trainable import ValueOutputSpec as ValueOutputSpec
    from rl_core.interfaces.weights import TransportContext as TransportContext
    from rl_core.interfaces.weights import WeightTransport as WeightTransport

__getattr__ = import_on_first_use(
    __name__, moved={"rl_core.tools.specs": "Tool", "rl_core.tools.environment": "ToolEnvironment"}
)
