"""vLLM's engine behind few verbs, in this process; knows rows as requests, and neither batches nor policies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, ClassVar

from rl_backends_vllm.extension import pack, unpack
from rl_core.errors import ConfigError, EngineDiedError


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """A request that ended in an error of its own, while the engine goes on."""

    request_id: str
    error: Exception


class Engine(ABC):
    """What a worker asks of vLLM.

    Attributes:
        config: the `vllm.VllmConfig` that it runs with.
        is_paused: between `hold` and `resume`.
    """

    config: Any
    is_paused: bool = False

    @abstractmethod
    def add(self, request_id: str, tokens: Sequence[int], parameters: Any) -> None:
        """Queue one prompt."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; those that are unknown or done are skipped."""

    @abstractmethod
    def finished(self, wait_s: float) -> list[Any]:
        """Requests that have ended since the last call, as `vllm.RequestOutput` or `FailedRequest`; works on until one has."""

    @abstractmethod
    def started(self) -> set[str]:
        """Requests under way that have a token."""

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker process of the engine."""

    @abstractmethod
    def pause(self) -> None:
        """Stop computing, with every request kept."""

    @abstractmethod
    def resume(self) -> None:
        """Compute again."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Empty the cache; requests under way compute their keys and values anew. True once it is empty."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free the memory of the KV cache, and move weights to the host (1) or drop them (2)."""

    @abstractmethod
    def wake(self, tag: str) -> None:
        """Take memory for "weights" or for "kv_cache" again."""

    @abstractmethod
    def is_dead(self) -> bool:
        """Whether a process of the engine has ended, so that nothing it is asked will be answered."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and its processes."""

    @contextmanager
    def detect_engine_death(self) -> Iterator[None]:
        """What vLLM raises in the block, as EngineDiedError where a process of the engine is gone."""
        try:
            yield
        except Exception as error:
            if self.is_dead():
                raise EngineDiedError(f"A process of the vLLM engine is gone: {type(error).__name__}: {error}") from error
            raise

    def refit(self, verb: str, *args: Any, **kwargs: Any) -> list[Any]:
        """A verb of `rl_backends_vllm.extension.METHODS` in every worker process; one result each."""
        return unpack(self.rpc("rlcore_refit", verb, pack(*args, **kwargs)))


class InProcessEngine(Engine):
    """The engine's core in this process; it computes while `finished` is called.

    Args:
        arguments: of `vllm.EngineArgs`.
    """

    _instance: ClassVar[InProcessEngine | None] = None
    """The one that runs in this process."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if InProcessEngine._instance is not None:
            raise ConfigError(
                "A vLLM engine runs in this process already, and process groups are the process's: the end of one would end "
                "the other. Shut the first down, give the second `vllm_cfg.async_engine: true`, or run both over a cluster."
            )
        # vLLM's default for the tokens of one step depends on what it is used for; as in `vllm.LLM`, it is the largest.
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        self.config = self._engine.vllm_config
        InProcessEngine._instance = self

    def add(self, request_id: str, tokens: Sequence[int], parameters: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._engine.add_request(request_id, tokens_input(list(tokens)), parameters)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def finished(self, wait_s: float) -> list[Any]:
        until = time.monotonic() + wait_s
        done: list[Any] = []
        with self.detect_engine_death():
            while not done and not self.is_paused and self._engine.has_unfinished_requests():
                done = [output for output in self._engine.step() if output.finished]
                if time.monotonic() >= until:
                    break
        return done

    def started(self) -> set[str]:
        return requests_with_output(self._engine.output_processor)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        with self.detect_engine_death():
            answers: list[Any] = self._engine.collective_rpc(method, args=args)
        return answers

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache(reset_running_requests=True))

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self, tag: str) -> None:
        self._engine.wake_up([tag])

    def is_dead(self) -> bool:
        executor = self._engine.model_executor
        # vLLM's own watch over its processes may be later than the error that the death of one makes in another.
        ends = [process.proc.sentinel for process in getattr(executor, "workers", None) or ()]
        return bool(getattr(executor, "is_failed", False) or connection.wait(ends, timeout=0))

    def shutdown(self) -> None:
        InProcessEngine._instance = None
        self._engine.engine_core.shutdown()


def requests_with_output(output_processor: Any) -> set[str]:
    """Requests that vLLM's output processor has seen a token of."""
    return {state.external_req_id for state in output_processor.request_states.values() if not state.is_prefilling}
