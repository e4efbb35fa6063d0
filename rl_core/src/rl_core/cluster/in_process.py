"""A worker group of one worker in this process, without Ray: for debuggers and fast tests."""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any, Literal

from rl_core.cluster.sharding import NamedSharding
from rl_core.cluster.worker_group import Arguments, Leading, PendingCall, WorkerGroup
from rl_core.data.process_seed import separate_generators
from rl_core.errors import EngineDiedError, RLCoreError, UserError, WorkerDiedError, WorkerError, frames_of
from rl_core.event_loop import finished
from rl_core.interfaces.worker_context import WorkerContext, construct, explaining_memory, seed_call
from rl_core.rendezvous.interfaces import free_port


class InProcessWorkerGroup(WorkerGroup):
    """A worker group of one object; arguments and results are passed by reference.

    A submitted call runs immediately, before `submit_...` returns. Deadlines do not apply: nothing can interrupt the
    driver's own thread, which may be stopped in a debugger. A worker that raises EngineDiedError is dead until `restart`.

    Args:
        worker_class: Gets a `WorkerContext` first if its constructor takes one.
        worker_kwargs: The other constructor arguments.
        sharding: Every axis of size 1; only `data` by default.
        name: Name of the group in errors.
        device: Device that the worker computes on.
        num_threads: Passed to the worker; the process's own thread count is unchanged.
    """

    def __init__(
        self,
        worker_class: type,
        *,
        worker_kwargs: Mapping[str, Any] | None = None,
        sharding: NamedSharding | None = None,
        name: str = "",
        device: Literal["cpu", "cuda"] = "cpu",
        num_threads: int = 1,
    ) -> None:
        self.sharding = sharding or NamedSharding.grid(data=1)
        if self.sharding.size != 1:
            raise UserError(f"an in-process group has one worker, but {self.sharding} needs {self.sharding.size}")
        self._class = worker_class
        self._kwargs = dict(worker_kwargs or {})
        self._name = name or worker_class.__name__
        self._context = WorkerContext(
            rank=0,
            world_size=1,
            local_rank=0,
            node_rank=0,
            master_address="127.0.0.1",
            master_port=free_port("127.0.0.1"),
            coords=self.sharding.get_worker_coords(0),
            device=device,
            num_threads=num_threads,
            run_in_process=True,
        )
        self._has_died = False
        self._generators: list[Any] = []  # generators of the engine, whose draws are not those of other components
        self._worker: Any = self._build()

    @property
    def worker(self) -> Any:
        """The worker itself; None after `shutdown`."""
        return self._worker

    def pids(self) -> list[int]:
        return [os.getpid()]

    def describe_rank(self, rank: int) -> str:
        self.sharding.get_worker_coords(rank)
        return f"rank {rank} of '{self._name}', in this process"

    def workers_alive(self) -> list[bool]:
        return [self._worker is not None and not self._has_died]

    def restart(self, rank: int | None = None) -> None:
        if rank is not None:
            self.sharding.get_worker_coords(rank)
        self.shutdown()
        self._worker, self._has_died = self._build(), False

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if hasattr(worker, "shutdown"):
            worker.shutdown()

    def _build(self) -> Any:
        try:
            return construct(self._class, self._context, self._kwargs)
        except (Exception, SystemExit) as error:
            raise self._failed("__init__", error) from error

    def _submit(
        self, method: str, leading: Leading, shared: Arguments, *, deadline_s: float | None, kept: Collection[int] | None = None
    ) -> PendingCall:
        for rank in leading:
            self.sharding.get_worker_coords(rank)
        if not leading:
            raise UserError(f"{method}() of group '{self._name}' was called on no rank")
        args, kwargs = (*leading[0], *shared[0]), shared[1]
        if self._worker is None:
            raise UserError(f"group '{self._name}' was shut down; {method}() cannot run on it")
        try:
            samples = method in ("generate", "poll")
            generators = separate_generators(self._generators) if samples else nullcontext()
            with generators, explaining_memory(self._worker, method):
                seed_call(self._worker, self._context, method, args)
                value = finished(getattr(self._worker, method)(*args, **kwargs))
        except (Exception, SystemExit) as error:
            failed = self._failed(method, error)
            failed.__cause__ = error
            return PendingCall.completed(None, failed)
        return PendingCall.completed(value, None)

    def _failed(self, method: str, error: BaseException) -> WorkerError:
        self._has_died |= isinstance(error, EngineDiedError)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        failed = (WorkerDiedError if isinstance(error, EngineDiedError) else WorkerError)(
            f"rank 0 of '{self._name}', in this process, failed in {method}(): {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})"
        )
        failed.exit_code = error.exit_code if isinstance(error, RLCoreError) else 1
        failed.group, failed.frames, failed.raised = self._name, frames_of(error), f"{type(error).__name__}: {error}"
        return failed
