"""What a backend, an environment, a loss, a dataset or a logger must be; no logic.

The names below are loaded when they are first used, so that importing a module of this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use
from rl_core.old_paths import NEW_NAMES

if TYPE_CHECKING:
    from rl_core.interfaces.environment import EnvironmentInterface as EnvironmentInterface
    from rl_core.interfaces.environment import EnvironmentReturn as EnvironmentReturn
    from rl_core.interfaces.generation import GenerationDatumSpec as GenerationDatumSpec
    from rl_core.interfaces.generation import GenerationInterface as GenerationInterface
    from rl_core.interfaces.generation import GenerationOutputSpec as GenerationOutputSpec
    from rl_core.interfaces.policy import ColocatablePolicyInterface as ColocatablePolicyInterface
    from rl_core.interfaces.policy import LogprobOutputSpec as LogprobOutputSpec
    from rl_core.interfaces.policy import LogprobsSpec as LogprobsSpec
    from rl_core.interfaces.policy import LossFunction as LossFunction
    from rl_core.interfaces.policy import LossType as LossType
    from rl_core.interfaces.policy import PolicyInterface as PolicyInterface
    from rl_core.interfaces.policy import ReferenceLogprobOutputSpec as ReferenceLogprobOutputSpec
    from rl_core.interfaces.policy import TopkLogprobOutputSpec as TopkLogprobOutputSpec
    from rl_core.interfaces.policy import TrainableInterface as TrainableInterface
    from rl_core.interfaces.policy import TrainingDatumSpec as TrainingDatumSpec
    from rl_core.interfaces.policy import TransportContext as TransportContext
    from rl_core.interfaces.policy import ValueInterface as ValueInterface
    from rl_core.interfaces.policy import ValueOutputSpec as ValueOutputSpec
    from rl_core.interfaces.policy import WeightTransport as WeightTransport
    from rl_core.interfaces.records import Dataset as Dataset
    from rl_core.interfaces.records import ImagePart as ImagePart
    from rl_core.interfaces.records import Message as Message
    from rl_core.interfaces.records import PartsMessage as PartsMessage
    from rl_core.interfaces.records import Record as Record
    from rl_core.interfaces.records import TextPart as TextPart
    from rl_core.interfaces.records import ToolCall as ToolCall
    from rl_core.interfaces.records import ToolSpec as ToolSpec

__getattr__ = import_on_first_use(__name__, moved=NEW_NAMES[__name__])
