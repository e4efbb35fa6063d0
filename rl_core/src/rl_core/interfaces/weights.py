"""Weight transports: each moves every tensor of a policy to a generation backend, once per refit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """Settings of the run that a transport needs."""

    buffer_bytes: int
    """Maximum bytes of weights in transit at a time; a larger tensor is sent alone."""
    deadline_s: float
    """Timeout of one refit in seconds."""
    wait: Callable[[Sequence[Any], float], Any]
    """Waits for pending calls of both ends together, at most a number of seconds; raises the first error (`collective`)."""
    rendezvous: Callable[[], tuple[str, int]]
    """Returns an address and a free port on the node of the policy's rank 0, for a process group rendezvous."""
    folder: Path = Path(gettempdir())
    """Folder for files of weights that both policy and generation backend can access."""
    receiver_dtypes: Callable[[], Mapping[str, str]] = dict
    """Name to the engine's dtype, such as "bfloat16", in the current refit; a tensor not listed is sent as it is."""
    num_receivers: int = 1
    """Number of generation workers that load weights in a refit of the whole engine; `generation.num_workers` in `push`."""
    on_sent: Callable[[], None] = lambda: None
    """Optional: call it once all weights have left the policy, to start its remaining work while the last are loaded."""


class WeightTransport(ABC):
    """A way to move weights from a policy to a generation backend.

    Attributes:
        name: the name under which it is registered.
        requires: capabilities that both backends must have, such as `("disk",)`; literals, for `rlcore validate`.
        shares_memory: the engine computes with the policy's own tensors and checks that in `update_weights`. Only the first
            refit then compares fingerprints: they would be of the same memory.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    shares_memory: ClassVar[bool] = False

    def __init__(self, context: TransportContext) -> None:
        """Store the run's limits; nothing is opened before the first push."""
        self.context = context

    @abstractmethod
    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        """Send all weights; the generation backend has already received the manifest.

        Returns:
            Bytes moved; 0 if nothing was copied.

        Raises:
            WeightSyncError: either side rejected a tensor.
            DeadlineExceededError: the refit took longer than `context.deadline_s`.
        """

    def close(self) -> None:
        """Leave process groups and free buffers; calling it twice is fine."""
        return None
