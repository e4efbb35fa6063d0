"""vLLM's executors, which start the processes of a replica, with cleanup of the shared memory and files they create."""

from __future__ import annotations

from vllm.model_executor.model_loader import weight_utils  # noqa: F401  (creates its locks in the usual folder)
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rl_backends_vllm.shm_cleanup import tempfiles_in_replica_folder, unlink_shared_memory


class _CleansUp(Executor):
    """Mixin to put before one of vLLM's executors."""

    def _init_executor(self) -> None:
        with tempfiles_in_replica_folder():
            super()._init_executor()
        unlink_shared_memory()


class SingleProcessExecutor(_CleansUp, UniProcExecutor):
    """Runs the worker in the process of the engine core."""


class MultiProcessExecutor(_CleansUp, MultiprocExecutor):
    """Runs each worker in a separate process, even inside a Ray actor, where vLLM would use Ray by default."""
