"""What replaces parts of vLLM in each process of an engine: executors that remove shared memory, and speculation on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import weight_utils  # noqa: F401  (creates its locks in the usual folder)
from vllm.model_executor.models.transformers import base
from vllm.utils import cpu_triton_utils
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


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each row's value [B] to its proposed tokens [N], which end at `ends` [B].

    That of vLLM 0.32 for CPUs writes to a copy, so the temperatures of proposed tokens would be arbitrary memory.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = _expand


class NgramProposer:
    """Proposes the tokens that followed the earliest occurrence of the longest n-gram that a row ends with, as vLLM does.

    Args:
        vllm_config: of the engine, with the lengths of n-grams in `additional_config`.
    """

    def __init__(self, vllm_config: Any) -> None:
        section, self._max_length = vllm_config.additional_config, vllm_config.model_config.max_model_len
        self._count = section["num_speculative_tokens"]
        self._sizes = range(section["prompt_lookup_max"], section["prompt_lookup_min"] - 1, -1)

    def load_model(self, model: Any) -> None:
        """Nothing, because it has no weights."""

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        """The proposed tokens of each row.

        Args:
            sampled: new tokens of each row; a row without any is still being prefilled.
            lengths: number of tokens of each row, an array [B].
            tokens: prompt and completion of each row, an array [B, T].
            slot_mappings: unused.
        """
        return [
            self._continuation(row[:length]) if new else [] for new, row, length in zip(sampled, tokens, lengths, strict=False)
        ]

    def _continuation(self, tokens: Any) -> list[int]:
        count = max(min(self._count, self._max_length - len(tokens)), 0)
        for size in self._sizes:
            if size < len(tokens):
                windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
                if len(found := (windows == tokens[-size:]).all(axis=1).nonzero()[0]):
                    start = found[0] + size
                    return [int(token) for token in tokens[start : start + count]]
        return []


class SingleProcessExecutor(_CleansUp, UniProcExecutor):
    """Runs the worker in the process of the engine core."""


class MultiProcessExecutor(_CleansUp, MultiprocExecutor):
    """Runs each worker in a separate process, even inside a Ray actor, where vLLM would use Ray by default."""
