"""vLLM's asynchronous engine with the same interface: its core runs in a separate process and computes continuously."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rl_backends_vllm.engine import Engine, FailedRequest
from rl_core.data.images import RowImage
from rl_core.errors import EngineDiedError

_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 10.0
"""Timeout for the core process to exit; then it is killed. It needs about two seconds on an idle machine. A worker has
`rl_core.cluster.worker_group.Deadlines.stop_s` for all of its shutdown."""
STOP_LOOP_TIMEOUT_S = 2.0
"""Timeout for the event loop to end its current callback; then its thread is left to the end of the process."""
_EXITED = "The core process of the vLLM engine exited."
_FAILED = "vLLM reports that the core of its engine failed. The log of the run has its error."


class AsyncEngine(Engine):
    """`vllm.AsyncLLM` on an event loop in its own thread.

    Args:
        arguments: of `vllm.AsyncEngineArgs`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        try:
            self._engine, self._sentinels, self._death = self._on_loop(self._start(arguments))
        except BaseException:
            self._stop_loop()
            raise
        self.config = self._engine.vllm_config

    def add(self, request_id: str, tokens: Sequence[int], parameters: Any, images: Sequence[RowImage] = ()) -> None:
        self._wait(self._submit(request_id, self._input(tokens, images), parameters))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._wait(self._abort(list(request_ids)))

    def finished(self, wait_s: float) -> list[Any]:
        done: list[Any] = []
        try:
            done.append(self._finished.get(timeout=wait_s))
            while True:
                done.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        if self.is_dead():
            raise EngineDiedError(self._reason())
        return done

    def rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self._wait(self._engine.collective_rpc(method, args=args))
        return answers

    def is_dead(self) -> bool:
        return bool(self._engine.errored) or self._has_exited()

    def _has_exited(self) -> bool:
        # The event loop may be busy, so it may learn about the exit much later.
        return self._death.done() or bool(multiprocessing.connection.wait(self._sentinels, timeout=0))

    def _reason(self) -> str:
        return _EXITED if self._has_exited() else _FAILED

    def pause(self) -> None:
        self._wait(self._engine.pause_generation(mode="keep"))
        self.is_paused = True

    def resume(self) -> None:
        self._wait(self._engine.resume_generation())
        self.is_paused = False

    def set_weight_version(self, version: int) -> None:
        self._wait(self._engine.update_weight_version(str(version)))

    def reset_prefix_cache(self) -> bool:
        emptied = bool(self._wait(self._engine.reset_prefix_cache(reset_running_requests=True)))
        self._wait(self._engine.reset_encoder_cache())
        return emptied

    def sleep(self, level: int) -> None:
        self._wait(self._engine.sleep(level))

    def wake(self, tag: str) -> None:
        self._wait(self._engine.wake_up([tag]))

    def shutdown(self) -> None:
        self._on_loop(self._end())
        # Freed on the loop's thread, which owns the sockets and is awaited only briefly: closing their context blocks while
        # one of them is open.
        self._loop.call_soon_threadsafe(self.__dict__.pop, "_engine")
        self._stop_loop()
        multiprocessing.active_children()  # joins a process that was killed; otherwise it would stay a zombie

    async def _start(self, arguments: Mapping[str, Any]) -> tuple[Any, list[int], asyncio.Future[None]]:
        """The engine, the sentinels of its core's processes, and a future that is done when one of them has exited."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
        loop = asyncio.get_running_loop()
        death: asyncio.Future[None] = loop.create_future()

        def note_exit(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            if not death.done():
                death.set_result(None)

        sentinels = [process.sentinel for process in engine.engine_core.resources.engine_manager.processes]
        for sentinel in sentinels:
            loop.add_reader(sentinel, note_exit, sentinel)
        return engine, sentinels, death

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    async def _submit(self, request_id: str, prompt: Any, parameters: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._consume(request_id, prompt, parameters))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _consume(self, request_id: str, prompt: Any, parameters: Any) -> None:
        adapter = self.adapter_request
        try:
            async for output in self._engine.generate(prompt, parameters, request_id, lora_request=adapter):
                self._finished.put(output)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # `finished` returns it in the waiting thread
            self._finished.put(FailedRequest(request_id=request_id, error=error))

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()
        await self._engine.abort(request_ids)

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call of the engine; raises EngineDiedError if its core has exited or exits meanwhile."""
        return self._on_loop(self._result_unless_dead(call))

    async def _result_unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        # vLLM does not fail the calls that its core had not answered when it exited.
        task = asyncio.ensure_future(call)
        if not self.is_dead():
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise EngineDiedError(self._reason())
        with self.detect_engine_death():
            return task.result()

    def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_LOOP_TIMEOUT_S)
        if self._thread.is_alive():  # a running loop cannot be closed
            _log.warning("The event loop of the vLLM engine did not stop within %g s.", STOP_LOOP_TIMEOUT_S)
        else:
            self._loop.close()
