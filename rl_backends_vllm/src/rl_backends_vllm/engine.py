"""A small interface to vLLM's engine, and its in-process implementation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, ClassVar

from rl_backends_vllm.refit import pack, unpack
from rl_backends_vllm.torch_threads import use_torch_threads
from rl_core.data.images import RowImage
from rl_core.errors import ConfigError, EngineDiedError


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """A request that failed while the engine continues to run."""

    request_id: str
    error: Exception


class Engine(ABC):
    """The operations that a worker needs from vLLM.

    Attributes:
        config: the engine's `vllm.VllmConfig`.
        is_paused: true between `pause` and `resume`.
    """

    config: Any
    is_paused: bool = False
    _engine: Any
    """vLLM's own engine."""

    @property
    def adapter_request(self) -> Any:
        """The `LoRARequest` that every request carries; None if the engine computes without adapters."""
        if self.config.lora_config is None:
            return None
        from rl_backends_vllm.lora import REQUEST

        return REQUEST

    def _input(self, tokens: Sequence[int], images: Sequence[RowImage]) -> Any:
        """The input of vLLM for a prompt."""
        from vllm.inputs.engine import tokens_input

        if not images:
            return tokens_input(list(tokens))
        from rl_backends_vllm.pictures import picture_input

        return picture_input(tokens, images, model_type=self.config.model_config.hf_config.model_type)

    @abstractmethod
    def add(self, request_id: str, tokens: Sequence[int], parameters: Any, images: Sequence[RowImage] = ()) -> None:
        """Queue one prompt, whose `images` are in the order of their tokens."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Cancel requests; unknown and finished ones are skipped."""

    @abstractmethod
    def finished(self, wait_s: float) -> list[Any]:
        """Requests finished since the last call (`vllm.RequestOutput` or `FailedRequest`); waits at most `wait_s` for one.

        Also unfinished outputs of the requests that stream, after each of their tokens.
        """

    def tokens_in_progress(self) -> int:
        """Number of tokens sampled so far for the requests that have not finished; callable in any thread."""
        requests = list(self._engine.output_processor.request_states.values())
        return sum(request.detokenizer.num_output_tokens() for request in requests)

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker process of the engine."""

    @abstractmethod
    def pause(self) -> None:
        """Stop computing; requests are kept."""

    @abstractmethod
    def resume(self) -> None:
        """Continue the paused requests."""

    @abstractmethod
    def set_weight_version(self, version: int) -> None:
        """The weight version of all tokens from now on; called while the engine is paused or has no requests."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Empty the KV cache; keys and values of running requests are recomputed. Returns whether the cache is empty.

        Also removes the features of pictures, which would otherwise remain those of older weights.
        """

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free the KV cache, and move weights to host memory (1) or discard them (2)."""

    @abstractmethod
    def wake(self, tag: str) -> None:
        """Allocate memory for "weights" or "kv_cache" again."""

    @abstractmethod
    def is_dead(self) -> bool:
        """Whether a process of the engine has exited, so that calls would never return."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engine and its processes."""

    @contextmanager
    def detect_engine_death(self) -> Iterator[None]:
        """Raise EngineDiedError instead of vLLM's own exception if a process of the engine has exited."""
        try:
            yield
        except Exception as error:
            if self.is_dead():
                raise EngineDiedError(f"A process of the vLLM engine exited: {type(error).__name__}: {error}") from error
            raise

    def refit(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of `rl_backends_vllm.refit.METHODS` in every worker process; returns one result per process."""
        return unpack(self.rpc("rlcore_refit", method, pack(*args, **kwargs)))


class InProcessEngine(Engine):
    """Runs the engine core in this process; it computes only during calls of `finished`.

    Args:
        arguments: of `vllm.EngineArgs`.
    """

    _instance: ClassVar[InProcessEngine | None] = None
    """The engine running in this process."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if InProcessEngine._instance is not None:
            raise ConfigError(
                "This process already runs a vLLM engine. Both would share process groups, so stopping one would stop the "
                "other. Shut the first down, set `vllm_cfg.async_engine: true` for the second, or run both on a cluster.",
                key="vllm_cfg.async_engine",
            )
        use_torch_threads()
        # vLLM's default number of tokens per step depends on the usage context; that of `vllm.LLM` is the largest.
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        except BaseException:
            _destroy_process_groups()
            raise
        self.config = self._engine.vllm_config
        InProcessEngine._instance = self

    def add(self, request_id: str, tokens: Sequence[int], parameters: Any, images: Sequence[RowImage] = ()) -> None:
        prompt = self._input(tokens, images)
        self._engine.add_request(request_id, prompt, parameters, lora_request=self.adapter_request)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def finished(self, wait_s: float) -> list[Any]:
        until = time.monotonic() + wait_s
        done: list[Any] = []
        use_torch_threads()
        with self.detect_engine_death():
            while not done and not self.is_paused and self._engine.has_unfinished_requests():
                done = list(self._engine.step())
                if time.monotonic() >= until:
                    break
        return done

    def rpc(self, method: str, *args: Any) -> list[Any]:
        with self.detect_engine_death():
            answers: list[Any] = self._engine.collective_rpc(method, args=args)
        return answers

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def set_weight_version(self, version: int) -> None:
        self._engine.set_weight_version(str(version))

    def reset_prefix_cache(self) -> bool:
        emptied = bool(self._engine.reset_prefix_cache(reset_running_requests=True))
        self._engine.reset_encoder_cache()
        return emptied

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self, tag: str) -> None:
        self._engine.wake_up([tag])

    def is_dead(self) -> bool:
        executor = self._engine.model_executor
        # vLLM's process monitor may notice a dead process later than the error it causes in another one.
        ends = [process.proc.sentinel for process in getattr(executor, "workers", None) or ()]
        return bool(getattr(executor, "is_failed", False) or connection.wait(ends, timeout=0))

    def shutdown(self) -> None:
        InProcessEngine._instance = None
        self._engine.engine_core.shutdown()


def _destroy_process_groups() -> None:
    """Destroy what an engine that did not start leaves to the next engine of this process.

    vLLM reuses existing process groups, though a mixture of experts needs groups that a dense model does not create.
    """
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.cleanup_dist_env_and_memory()
