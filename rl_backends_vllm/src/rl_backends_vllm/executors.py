"""vLLM's executors, which start the processes of a replica; what they make in memory and in files does not outlive them."""

from __future__ import annotations

from vllm.model_executor.model_loader import weight_utils  # noqa: F401  (its locks lie where they did before)
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rl_backends_vllm.shm_cleanup import tempfiles_in_replica_folder, unlink_shared_memory


class _CleansUp(Executor):
    """Goes before one of vLLM's executors."""

    def _init_executor(self) -> None:
        with tempfiles_in_replica_folder():
            super()._init_executor()
        unlink_shared_memory()


class SingleProcessExecutor(_CleansUp, UniProcExecutor):
    """The worker in the process of the engine's core."""


class MultiProcessExecutor(_CleansUp, MultiprocExecutor):
    """Each worker in a process of its own, also inside of a Ray actor, where vLLM by itself would take Ray."""
