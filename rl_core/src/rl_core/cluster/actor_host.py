"""The process around one worker: builds it, runs its methods, and turns what it raises into a record. Knows no group."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import cloudpickle

from rl_core.cluster import orphan_reaper, stacks
from rl_core.cluster.ports import free_port
from rl_core.errors import RLCoreError
from rl_core.interfaces.worker_context import WorkerContext, construct

MARKER = "RLCORE_WORKER"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process this is, as seen from outside.

    Attributes:
        created: When the process began, in seconds since the epoch: with the pid, unique on its host.
        address: Its node's, for a rendezvous.
        stack_file: Where its answers to `stacks.read_stack` appear.
        log_file: Where its standard error goes.
        visible_gpus: What Ray lets it see, as CUDA_VISIBLE_DEVICES has it; empty without GPUs.
    """

    host: str
    address: str
    node_id: str
    pid: int
    created: float
    stack_file: str
    log_file: str
    visible_gpus: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a worker raised.

    Attributes:
        summary: Type and message.
        traceback: The text, from the worker's method downwards.
        exit_code: Of the command, where the worker raised one of our errors.
        pickled: The exception itself, where it survives pickling; else None.
    """

    summary: str
    traceback: str
    exit_code: int
    pickled: bytes | None


class ActorHost:
    """The Ray actor. The worker is built by a call of its own, so that a failing constructor is attributed like any call."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._worker: Any = None
        self._stack_file = stacks.install()
        self._guard = orphan_reaper.start_reaper(MARKER, os.environ[MARKER])

    def __repr__(self) -> str:
        return self._label

    def identify(self) -> Identity:
        """Which process this is."""
        log = "/proc/self/fd/2"
        return Identity(
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            stack_file=self._stack_file,
            log_file=os.readlink(log) if os.path.islink(log) else "",
            visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )

    def find_port(self) -> int:
        """A port free on this node."""
        return free_port()

    def build(self, pickled: bytes, context: WorkerContext, env: Mapping[str, str]) -> Any | Failure:
        """Makes the worker; `pickled` holds (class, keyword arguments)."""
        try:
            os.environ.update(env)
            worker_class, kwargs = cloudpickle.loads(pickled)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(context.num_threads)
            self._worker = construct(worker_class, context, kwargs)
        except Exception as error:
            return _record(error)
        return None

    def call(
        self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]], keep_result: bool, *leading: Any
    ) -> Any | Failure:
        """The method's result, or None where nobody keeps it; `leading` comes before the positional arguments."""
        args, kwargs = arguments
        try:
            result = getattr(self._worker, method)(*leading, *args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return result if keep_result else None
        except Exception as error:
            return _record(error)

    def close(self) -> Any | Failure:
        """Runs the worker's own `shutdown`, where it has one."""
        return self.call("shutdown", ((), {}), False) if hasattr(self._worker, "shutdown") else None


async def _awaited(result: Any) -> Any:
    return await result


def _record(error: Exception) -> Failure:
    # Without the first frame, which is ours.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception may refuse to be pickled in any way; its text travels all the same
        pickled = None
    return Failure(
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback=text,
        exit_code=error.exit_code if isinstance(error, RLCoreError) else 1,
        pickled=pickled,
    )
