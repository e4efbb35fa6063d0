"""Weights over a process group of the policy's rank 0 and all generation workers: gloo, or NCCL if each has its own GPU."""

from __future__ import annotations

from typing import ClassVar

from rl_core.errors import RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.weights import TransportContext, WeightTransport
from rl_core.weights.collective import abort_rendezvous
from rl_core.weights.manifest import manifest_to_send, tensor_bytes


class CollectiveTransport(WeightTransport):
    """Policy and generation backend anywhere: broadcasts from the policy's rank 0 to every generation worker."""

    name: ClassVar[str] = "collective"
    requires: ClassVar[tuple[str, ...]] = ("collective",)

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._joined: tuple[int, int] | None = None
        """Restarts and receivers of the group; None without one."""
        self._left: set[tuple[str, int]] = set()

    def push(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> int:
        wait, deadline_s = self.context.wait, self.context.deadline_s
        group = generation.restarts, generation.num_workers
        if self._joined != group:
            self._join(policy, generation)
        # Joined again after any error, because an unfinished broadcast leaves the group unusable.
        self._joined = None
        # Two buckets are in transit at a time.
        policy.prepare_weights_for_ipc(self.context.buffer_bytes // 2, receiver_dtypes=self.context.receiver_dtypes())
        wait([*policy.broadcast_weights_for_collective(), *generation.update_weights_from_collective()], deadline_s)
        self._joined = group
        sent = manifest_to_send(policy.prepare_refit_info() or {}, self.context.receiver_dtypes())
        return sum(tensor_bytes(shape, dtype) for shape, dtype in sent.values())

    def _join(self, policy: ColocatablePolicyInterface, generation: GenerationInterface) -> None:
        ip, port = self._new_meeting_point()
        ranks = 1 + generation.num_workers
        calls = [*policy.init_collective(ip, port, ranks), *generation.init_collective(ip, port, ranks)]
        try:
            self.context.wait(calls, self.context.deadline_s)
        except RLCoreError:
            abort_rendezvous(ip, port)
            raise

    def _new_meeting_point(self) -> tuple[str, int]:
        """A port that was not used before, because a rank that leaves late may still hold the old one."""
        for _ in range(100):
            address = self.context.rendezvous()
            if address not in self._left:
                self._left.add(address)
                return address
        raise WeightSyncError(f"No new port was found for the weight collective in 100 attempts; the last was {address[1]}.")
