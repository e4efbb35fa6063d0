"""vLLM's executors, which start the processes of a replica, with cleanup of the shared memory and files they create."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.compilation.decorators import support_torch_compile
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import weight_utils  # noqa: F401  (creates its locks in the usual folder)
from vllm.model_executor.models.transformers import base
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rl_backends_vllm import pictures  # noqa: F401  (in each process of an engine)
from rl_backends_vllm.shm_cleanup import tempfiles_in_replica_folder, unlink_shared_memory


class _CleansUp(Executor):
    """Mixin to put before one of vLLM's executors."""

    def _init_executor(self) -> None:
        with tempfiles_in_replica_folder():
            super()._init_executor()
        unlink_shared_memory()


def _support_torch_compile(**settings: Any) -> Callable[[type[Any]], type[Any]]:
    """Decorate as vLLM does, for its own instances of a class of Transformers only.

    vLLM's backend for models of Transformers changes the class itself. Outside of vLLM's context, as for a policy in the same
    process, the class could not be instantiated any more, and earlier instances could not be called.
    """

    def decorate(cls: type[Any]) -> type[Any]:
        plain = cls.__init__
        support_torch_compile(**settings)(cls)
        decorated = cls.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            (plain if get_current_vllm_config_or_none() is None else decorated)(self, *args, **kwargs)

        # The default of instances that vLLM has not set up.
        cls.__init__, cls.do_not_compile = __init__, True
        return cls

    return decorate


base.support_torch_compile = _support_torch_compile


class SingleProcessExecutor(_CleansUp, UniProcExecutor):
    """Runs the worker in the process of the engine core."""


class MultiProcessExecutor(_CleansUp, MultiprocExecutor):
    """Runs each worker in a separate process, even inside a Ray actor, where vLLM would use Ray by default."""
