"""Progress of `generate` calls over Ray, in its key-value store, because a busy worker answers no other call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_put, internal_kv_get_gcs_client

NAMESPACE = "rlcore_batch_progress"
"""Its keys are IDs of actors, with which the IDs of their tasks end."""


@contextmanager
def stored_progress(worker: Any, method: str) -> Iterator[None]:
    """If the block calls `generate`, a thread stores the worker's `batch_progress` every second and at the end.

    It takes a millisecond of CPU time, so calls of less than a second, such as those for one row, store nothing.
    """
    if method != "generate" or not hasattr(worker, "batch_progress"):
        yield
        return
    ended, task = threading.Event(), ray.get_runtime_context().get_task_id()

    def store() -> None:
        is_last = ended.wait(1.0)
        while not is_last:
            is_last = ended.wait(1.0)
            if (progress := worker.batch_progress()) is not None:
                _internal_kv_put(task[16:], f"{task} {progress[0]} {progress[1]}", namespace=NAMESPACE)

    threading.Thread(target=store, name="rlcore-batch-progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def read_progress(tasks: Sequence[str]) -> tuple[int, int] | None:
    """The sum of what these tasks have stored; None if nothing, or if Ray does not answer."""
    keys = [task[16:].encode() for task in tasks]
    try:
        values = internal_kv_get_gcs_client().internal_kv_multi_get(keys, NAMESPACE.encode(), timeout=1.0).values()
    except ray.exceptions.RpcError:
        return None
    stored = [(int(rows), int(tokens)) for task, rows, tokens in map(bytes.split, values) if task.decode() in tasks]
    return (sum(rows for rows, _ in stored), sum(tokens for _, tokens in stored)) if stored else None
