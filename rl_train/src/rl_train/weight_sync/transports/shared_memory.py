"""Weights over shared memory of one node; on GPUs, over buffers in the memory of the common GPU."""

from __future__ import annotations

from typing import ClassVar

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport
from rl_core.weights.shared_memory import sweep
from rl_train.weight_sync.transports.bucket_pipeline import push_buckets


class SharedMemoryTransport(WeightTransport):
    """Policy and generation backend on one node: one copy into shared memory, one copy out of it, in buckets.

    On GPUs the same methods use buffers in the memory of the common GPU, by CUDA IPC.
    """

    name: ClassVar[str] = "shared_memory"
    requires: ClassVar[tuple[str, ...]] = ("shared_memory",)

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        sweep()
        return push_buckets(
            self.context, policy, generation, lambda _, names: policy.get_weights_ipc_handles(names), overdue=self._overdue
        )

    def close(self) -> None:
        sweep()

    def _overdue(self, bucket: str) -> str:
        return (
            f"The refit over shared memory has taken {self.context.deadline_s:g} s, and the generation backend has not "
            f"loaded bucket {bucket}. Check the load of the node, or raise cluster.deadlines.refit_s."
        )
