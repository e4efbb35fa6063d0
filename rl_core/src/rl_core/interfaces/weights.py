"""How weights travel: a transport moves every tensor of a policy to a generation backend, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface


class WeightTransport(ABC):
    """One way from a policy to a generation backend.

    Attributes:
        name: the capability that both sides list when they speak it.
    """

    name: ClassVar[str]

    @abstractmethod
    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        """Move all weights.

        Returns:
            Bytes moved; 0 where nothing was copied.

        Raises:
            WeightSyncError: either side refused a tensor.
        """

    def close(self) -> None:
        """Leave process groups and free buffers; calling it twice is fine."""
        return None
