"""A pool of workers that run independent calls: its interface, a pool of one object in this process, and its event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Event
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from rl_core.cluster.in_process import InProcessWorkerGroup
from rl_core.cluster.remote_actor import plain_class
from rl_core.event_loop import finished


class ActorKey(NamedTuple):
    """Identifies one process of a pool; the process that replaces it has another generation."""

    rank: int
    generation: int


class Pool(ABC):
    """Interface of a pool, either of Ray actors or of one object in this process.

    Attributes:
        worker_class: Module and name of the class of its workers, for errors.
    """

    worker_class: str = "unknown"

    @property
    @abstractmethod
    def num_actors(self) -> int:
        """Number of actors."""

    @property
    @abstractmethod
    def max_concurrency(self) -> int:
        """Number of calls that an actor runs at the same time."""

    @property
    @abstractmethod
    def actors(self) -> list[ActorKey]:
        """The current actors, without those that could not be started; empty if none could."""

    @abstractmethod
    def submit(self, method: str, *args: Any, deadline_s: float | None = None, on: ActorKey | None = None) -> Future[Any]:
        """Run `method(*args)` on the next free actor; returns without waiting.

        Args:
            method: The worker's method.
            args: Its arguments.
            deadline_s: Deadline from the start of the call; the pool's by default.
            on: Only run it on this actor; if it has died, the call fails with a WorkerDiedError.

        The future raises:
            WorkerError: The call raised.
            WorkerDiedError: The actor died.
            DeadlineExceededError: The call exceeded its deadline; includes its stack.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Run each actor's own `shutdown()`, then stop the processes. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


class ObjectPool(Pool):
    """A pool of one object in this process; `submit` calls its method as `while_paused` does.

    Args:
        worker: The object; it raises its own exceptions, and is not shut down with the pool.
    """

    def __init__(self, worker: Any) -> None:
        self.worker_class = class_path(type(worker))
        self._worker = worker

    @property
    def num_actors(self) -> int:
        return 1

    @property
    def max_concurrency(self) -> int:
        return 1

    @property
    def actors(self) -> list[ActorKey]:
        return [ActorKey(0, 0)]

    def submit(self, method: str, *args: Any, deadline_s: float | None = None, on: ActorKey | None = None) -> Future[Any]:
        return while_paused(lambda: finished(getattr(self._worker, method)(*args)))

    def shutdown(self) -> None:
        pass


class InProcessPool(ObjectPool):
    """A pool of one object in this process, without Ray; deadlines do not apply.

    Args:
        worker_class: A plain class, or one wrapped in `@ray.remote`, which is unwrapped.
        kwargs: Constructor arguments.
        max_concurrency: Number of submitted calls at the same time. Above 1, they run in threads; otherwise as `while_paused`.
        name: Name of the pool in errors.
    """

    def __init__(
        self, worker_class: Any, kwargs: Mapping[str, Any] | None = None, *, max_concurrency: int = 1, name: str = ""
    ) -> None:
        self.worker_class = class_path(worker_class)
        self._group = InProcessWorkerGroup(plain_class(worker_class), worker_kwargs=kwargs, name=name)
        self._max_concurrency = max_concurrency
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix=name) if max_concurrency > 1 else None

    @property
    def max_concurrency(self) -> int:
        return self._max_concurrency

    def submit(self, method: str, *args: Any, deadline_s: float | None = None, on: ActorKey | None = None) -> Future[Any]:
        if self._threads is not None:
            return self._threads.submit(self._run, method, args)
        return while_paused(self._run, method, args)

    def shutdown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._group.shutdown()

    def _run(self, method: str, call: Any) -> Any:
        return self._group.submit_some(method, {0: call}).result()[0]


def class_path(worker_class: Any) -> str:
    """Module and name of a class, unwrapped if it is wrapped in `@ray.remote`."""
    plain = plain_class(worker_class)
    return f"{plain.__module__}.{plain.__qualname__}"


ResultT = TypeVar("ResultT")


class PausingLoop(asyncio.SelectorEventLoop):
    """An event loop that pauses for calls of `while_paused`.

    They run in its thread, one after the other, but without a running event loop. So code of users may start one
    (`asyncio.run`), and finds the thread that it would find without rollouts: timeouts by signals work in the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_stopped = False
        self._held_s = 0.0

    def hold(self, until: Event) -> None:
        """Do nothing until an event is set; callbacks and timeouts wait as if no time passed."""
        began = super().time()
        until.wait()
        self._held_s += super().time() - began

    def time(self) -> float:
        """Seconds of a monotonic clock that stands still while the loop is held."""
        return super().time() - self._held_s

    def pause_for(self, call: Callable[[], object]) -> None:
        """Run a call after the current iteration, with the caller's context variables."""
        self._calls.append(partial(copy_context().run, call))
        super().stop()

    def stop(self) -> None:
        self._is_stopped = True
        super().stop()

    def run_forever(self) -> None:
        is_stopped = False
        while not is_stopped:
            super().run_forever()
            while self._calls:
                self._calls.popleft()()
            is_stopped, self._is_stopped = self._is_stopped, False


def while_paused(function: Callable[..., ResultT], *args: Any) -> Future[ResultT]:
    """Run a blocking call, at once or, in an event loop that can pause, after this function has returned."""
    future: Future[ResultT] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(*args))
        except (Exception, asyncio.CancelledError) as error:
            future.set_exception(error)

    loop = running_loop()
    if isinstance(loop, PausingLoop):
        loop.pause_for(run)
    else:
        run()
    return future


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
