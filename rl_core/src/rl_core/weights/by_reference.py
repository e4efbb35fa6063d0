"""Weights by reference: policy and generation backend in one process compute with the same tensors; nothing is copied."""

from __future__ import annotations

from typing import ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport


class ByReferenceTransport(WeightTransport):
    """Policy and generation backend in one process.

    The engine sees each optimizer step immediately, but its weight version changes only at the next refit, which is therefore
    still required before it samples.
    """

    name: ClassVar[str] = "by_reference"

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        for keys in policy.prepare_weights_for_ipc(self.context.buffer_bytes):
            generation.update_weights(policy.get_weights_ipc_handles(keys, by_reference=True))
        return 0
