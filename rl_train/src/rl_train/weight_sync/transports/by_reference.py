"""Weights by reference: policy and generation backend in one process compute with the same tensors; nothing is copied."""

from __future__ import annotations

from typing import ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport

_BUCKETS_AT_ONCE = 16
"""At most 256 MiB on a CPU, or a larger tensor; going through all weights once per bucket takes longer than sharing them."""


class ByReferenceTransport(WeightTransport):
    """Policy and generation backend in one process.

    The engine sees each optimizer step immediately, but its weight version changes only at the next refit. Until then it
    refuses to sample (`WeightSink.refuse_changed_weights`).
    """

    name: ClassVar[str] = "by_reference"
    requires: ClassVar[tuple[str, ...]] = ("by_reference",)
    shares_memory: ClassVar[bool] = True

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        buckets = policy.prepare_weights_for_ipc(self.context.buffer_bytes)
        # Nothing is copied, so buckets only limit what the policy computes for a refit, such as merged adapters.
        for first in range(0, len(buckets), _BUCKETS_AT_ONCE):
            keys = [key for bucket in buckets[first : first + _BUCKETS_AT_ONCE] for key in bucket]
            generation.update_weights(policy.get_weights_ipc_handles(keys, by_reference=True))
        return 0
