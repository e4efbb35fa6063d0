"""Workers in separate multiprocessing processes, and the two interfaces that a synchronizer takes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch
from tiny_refit_workers import context

_worker: Any = None


def _start(worker_class: type, rank: int, options: dict[str, Any]) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = worker_class(context(rank), **options)


def _call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(_worker, method)(*args, **kwargs)


def _replace(worker_class: type, rank: int, options: dict[str, Any]) -> None:
    _worker.shutdown()
    _start(worker_class, rank, options)


class WorkerProcess:
    """One worker in a spawned process."""

    def __init__(self, worker_class: type, rank: int = 0, **options: Any) -> None:
        self._rank = rank
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(worker_class, rank, options),
        )

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(_call, method, args, kwargs)

    def become(self, worker_class: type, **options: Any) -> None:
        """Replaces the worker in the same process, because starting one takes seconds."""
        self._pool.submit(_replace, worker_class, self._rank, options).result()

    @property
    def pid(self) -> int:
        return next(iter(self._pool._processes))

    def close(self) -> None:
        self._pool.shutdown()


class ProcessPolicy:
    """Policy ranks in processes."""

    def __init__(self, *ranks: WorkerProcess) -> None:
        self.ranks = ranks

    @property
    def weight_version(self) -> int:
        return self._all("get_weight_version")

    def init_collective(self, *args):
        return [rank.submit("init_collective", *args) for rank in self.ranks]

    def broadcast_weights_for_collective(self):
        return [rank.submit("broadcast_weights_for_collective") for rank in self.ranks]

    def __getattr__(self, method: str):
        return lambda *args, **kwargs: self._all(method, *args, **kwargs)

    def _all(self, method, *args, **kwargs):
        calls = [rank.submit(method, *args, **kwargs) for rank in self.ranks]
        answers = [call.result() for call in calls]
        return answers[0]


class ProcessEngine(ProcessPolicy):
    """Generation replicas in processes."""

    restarts = 0

    @property
    def num_workers(self) -> int:
        return len(self.ranks)

    def restart_dead(self, cause=None):
        return False

    def update_weights_from_collective(self):
        return [rank.submit("update_weights_from_collective") for rank in self.ranks]
