"""How weights travel: a transport moves every tensor of a policy to a generation backend, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface


def _nothing() -> None: ...


def _unknown() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """What a transport is told about the run."""

    buffer_bytes: int
    """Most bytes of weights on their way at one time; a single larger tensor travels alone."""
    deadline_s: float
    """Seconds that one refit may take."""
    wait: Callable[[Sequence[Any], float], Any]
    """Waits until all pending calls are done or so many seconds have passed (`rl_core.cluster.wait_together`)."""
    rendezvous: Callable[[], tuple[str, int]]
    """An address and a free port on the node of the policy's rank 0, for a process group to meet at."""
    folder: Path = Path(gettempdir())
    """Where files of weights may be written; policy and generation backend both see it."""
    kept: Callable[[], Mapping[str, str]] = _unknown
    """Name to the dtype that the generation backend keeps, such as "bfloat16", in the refit under way; a name that it lacks
    travels as it is."""
    num_receivers: int = 1
    """Generation workers that load weights."""
    on_sent: Callable[[], None] = _nothing
    """Called once all weights have left the policy while the generation backend still loads the last of them, by a transport
    that sees that moment: what the policy has left to do for the refit can then be done beside the loading."""


class WeightTransport(ABC):
    """One way from a policy to a generation backend.

    Attributes:
        name: the capability that both sides list when they speak it.
    """

    name: ClassVar[str]

    def __init__(self, context: TransportContext) -> None:
        """Take the run's limits; nothing is opened before the first push."""
        self.context = context

    @abstractmethod
    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        """Move all weights; the generation backend has already taken the manifest.

        Returns:
            Bytes moved; 0 where nothing was copied.

        Raises:
            WeightSyncError: either side refused a tensor.
            DeadlineExceededError: it took longer than `context.deadline_s`.
        """

    def close(self) -> None:
        """Leave process groups and free buffers; calling it twice is fine."""
        return None
