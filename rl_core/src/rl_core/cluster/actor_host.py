"""The process around one worker: builds it, runs its methods, records its exceptions, and publishes its progress."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from rl_core.cluster import daemons, orphan_reaper
from rl_core.data.process_seed import seed_process
from rl_core.errors import RLCoreError, frames_of
from rl_core.event_loop import finished
from rl_core.interfaces.worker_context import WorkerContext, construct, explaining_memory, seed_call
from rl_core.rendezvous.interfaces import free_port, interface_variables

MARKER = "RLCORE_WORKER"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Identifies a worker process.

    Attributes:
        address: Address of its node, for a rendezvous.
        port: A port that is free there.
        stack_file: File that its `daemons.read_stack` output appears in.
        log_file: File of its standard error.
        visible_gpus: GPUs that Ray makes visible to it, as in CUDA_VISIBLE_DEVICES; empty without GPUs.
    """

    host: str
    address: str
    port: int
    node_id: str
    pid: int
    stack_file: str
    log_file: str
    visible_gpus: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception raised by a worker.

    Attributes:
        summary: Type and message.
        traceback: The text, from the worker's method downwards.
        exit_code: Exit code of the command, if the worker raised an RLCoreError.
        pickled: The exception itself if it can be pickled, else None.
        frames: `WorkerError.frames`.
    """

    summary: str
    traceback: str
    exit_code: int
    pickled: bytes | None
    frames: tuple[tuple[str, int], ...]


class ActorHost:
    """The Ray actor. The worker is built by a separate call, so that an error in its constructor is reported like any other."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._worker: Any = None
        self._stack_file = daemons.enable_read_stack()
        self._guard = orphan_reaper.start_reaper(MARKER, os.environ[MARKER])

    def __repr__(self) -> str:
        return self._label

    def identify(self) -> Identity:
        """Identify this process."""
        log = "/proc/self/fd/2"
        return Identity(
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            port=free_port(),
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            stack_file=self._stack_file,
            log_file=os.readlink(log) if os.path.islink(log) else "",
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )

    def build(self, pickled: bytes, context: WorkerContext, env: Mapping[str, str]) -> Any | Failure:
        """Build the worker; `pickled` contains (class, keyword arguments)."""
        gc.disable()  # imports make a million objects that stay
        try:
            meeting = context.master_address  # a pool has none
            os.environ.update({**(interface_variables(meeting) if meeting else {}), **env})
            worker_class, kwargs = cloudpickle.loads(pickled)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(context.num_threads)
            self._context = context
            seed_process(context.seed, context.coords.get("data", context.rank))
            self._worker = construct(worker_class, context, kwargs)
            gc.freeze()
            gc.enable()
        except (Exception, SystemExit) as error:
            return _record(error)
        return None

    def call(
        self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]], keep_result: bool, *leading: Any
    ) -> Any | Failure:
        """Run a method and return its result, or None if it is not kept; `leading` precedes the positional arguments."""
        args, kwargs = arguments
        try:
            args = (*leading, *args)
            seed_call(self._worker, self._context, method, args)
            with explaining_memory(self._worker, method), stored_progress(self._worker, method):
                result = finished(getattr(self._worker, method)(*args, **kwargs))
            return result if keep_result else None
        except (Exception, SystemExit) as error:
            return _record(error)

    def close(self) -> Any | Failure:
        """Run the worker's own `shutdown`, if it has one."""
        return self.call("shutdown", ((), {}), False) if hasattr(self._worker, "shutdown") else None


def _record(error: BaseException) -> Failure:
    # Without the first frame, which belongs to this module.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # pickling may raise anything; the text is still sent
        pickled = None
    return Failure(
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback=text,
        exit_code=error.exit_code if isinstance(error, RLCoreError) else 1,
        pickled=pickled,
        frames=frames_of(error),
    )


NAMESPACE = b"rlcore_batch_progress"
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
                stored = f"{task} {progress[0]} {progress[1]}".encode()
                internal_kv_get_gcs_client().internal_kv_put(task[16:].encode(), stored, True, NAMESPACE)

    threading.Thread(target=store, name="rlcore-batch-progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def read_progress(tasks: Sequence[str]) -> tuple[int, int] | None:
    """The sum of what these tasks have stored; None if nothing, or if Ray does not answer."""
    keys = [task[16:].encode() for task in tasks]
    try:
        values = internal_kv_get_gcs_client().internal_kv_multi_get(keys, NAMESPACE, timeout=1.0).values()
    except ray.exceptions.RpcError:
        return None
    stored = [(int(rows), int(tokens)) for task, rows, tokens in map(bytes.split, values) if task.decode() in tasks]
    return (sum(rows for rows, _ in stored), sum(tokens for _, tokens in stored)) if stored else None
