"""Weights over shared memory of one node; on GPUs, over buffers in the memory of the common GPU."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ClassVar

from rl_core.errors import DeadlineExceededError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import WeightTransport
from rl_core.weights.shared_memory import sweep


class SharedMemoryTransport(WeightTransport):
    """Policy and generation backend on one node: one copy into shared memory, one copy out of it, in buckets.

    On GPUs the same methods use buffers in the memory of the common GPU, by CUDA IPC.
    """

    name: ClassVar[str] = "shared_memory"

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        sweep()
        deadline = time.monotonic() + self.context.deadline_s
        # Two buckets are in transit at a time: one is written while the previous one is read.
        buckets = policy.prepare_weights_for_ipc(self.context.buffer_bytes // 2, receiver_dtypes=self.context.receiver_dtypes())
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlcore-refit")
        loading: Future[None] | None = None
        moved = 0
        try:
            for number, keys in enumerate(buckets, 1):
                handles = policy.get_weights_ipc_handles(keys)
                self._finish(loading, deadline, f"bucket {number - 1} of {len(buckets)}")
                loading = reader.submit(generation.update_weights, handles)
                moved += int(handles["num_bytes"])
            self.context.on_sent()
            self._finish(loading, deadline, f"bucket {len(buckets)} of {len(buckets)}")
        except BaseException:
            if loading is not None:
                # Otherwise the engine would continue loading into the next refit.
                wait([loading], timeout=max(deadline - time.monotonic(), 0.0))
            raise
        finally:
            reader.shutdown(wait=False, cancel_futures=True)
        return moved

    def close(self) -> None:
        sweep()

    def _finish(self, loading: Future[None] | None, deadline: float, what: str) -> None:
        try:
            if loading is not None:
                loading.result(timeout=max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise DeadlineExceededError(
                f"The refit over shared memory has taken {self.context.deadline_s:g} s, and the generation backend has not "
                f"loaded {what}. Check the load of the node, or raise cluster.deadlines.refit_s."
            ) from None
