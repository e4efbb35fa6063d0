"""The driver's handle of one worker process: start, call, inspect and stop it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.cluster import daemons, orphan_reaper, ray_internals
from rl_core.cluster.actor_host import MARKER, NAMESPACE, ActorHost, Failure, Identity
from rl_core.cluster.ray_runtime import live_nodes
from rl_core.errors import EngineDiedError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext

_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)

_NOT_STARTED = "If none has room, add a node (`ray start --address=...`). Otherwise its environment is being created."


def pack_worker(worker_class: type, kwargs: Mapping[str, Any]) -> Any:
    """A reference to the pickled class and its keyword arguments, stored once for all workers."""
    return ray.put(cloudpickle.dumps((plain_class(worker_class), dict(kwargs))))


def plain_class(worker_class: Any) -> type:
    """The class, unwrapped if it is wrapped in `@ray.remote`."""
    plain: type = worker_class.__ray_metadata__.modified_class if is_wrapped(worker_class) else worker_class
    return plain


def is_wrapped(worker_class: Any) -> bool:
    """Whether a class is wrapped in `@ray.remote`."""
    return isinstance(worker_class, ray.actor.ActorClass)


def ray_options(worker_class: Any) -> dict[str, Any]:
    """The options of a class wrapped in `@ray.remote(...)`, without those that a pool or group decides."""
    if not is_wrapped(worker_class):
        return {}
    decided = {
        "name", "namespace", "get_if_exists", "lifetime", "max_restarts", "max_task_retries", "max_concurrency",
        "max_pending_calls", "concurrency_groups", "enable_task_events", "_metadata",
    }  # fmt: skip
    options = ray_internals.decorator_options(worker_class)
    return {key: value for key, value in options.items() if key not in decided and value is not None}


class RemoteActor:
    """One worker process.

    Args:
        label: Its name in errors and logs, such as "rank 1 (data=1) of 'policy'".
        options: Ray actor options (CPUs, GPUs, placement).
        env: Environment variables of the process.
        runtime_env: Ray runtime environment, such as another Python.

    Attributes:
        group: The group or pool that it belongs to.
        marker: Identifies its process and that process's children for `orphan_reaper`.
    """

    def __init__(
        self, label: str, *, options: Mapping[str, Any], env: Mapping[str, str], runtime_env: Mapping[str, Any], group: str = ""
    ) -> None:
        daemons.raise_if_dead()
        self.label = label
        self.group = group
        self._identity: Identity | None = None
        self._process: psutil.Process | None = None
        self._death_seen = False
        self.marker = uuid.uuid4().hex
        self._needs = getattr(getattr(options.get("scheduling_strategy"), "placement_group", None), "bundle_specs", options)
        own_env = {**runtime_env.get("env_vars", {}), **env, MARKER: self.marker}
        self._handle = (
            ray.remote(ActorHost)
            .options(
                **{"num_cpus": 0, **options},
                max_restarts=0,
                max_task_retries=0,
                runtime_env={**runtime_env, "env_vars": own_env},
            )
            .remote(label)
        )
        self._identity_ref = self._handle.identify.remote()
        self._id: str = self._identity_ref.task_id().hex()[16:]

    @property
    def identity(self) -> Identity | None:
        """Identifies its process; None before it has started."""
        if self._identity is None and ray.wait([self._identity_ref], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # it never started, and `started().result()` says why
                identity = ray.get(self._identity_ref)
                if identity.host == gethostname():
                    with suppress(psutil.NoSuchProcess):
                        self._process = psutil.Process(identity.pid)
                self._identity = identity
        return self._identity

    def started(self) -> ActorCall:
        """Wait for its process."""
        return ActorCall(self, "start", self._identity_ref)

    def build(self, packed: Any, context: WorkerContext, env: Mapping[str, str]) -> ActorCall:
        """Build the worker from the reference returned by `pack_worker`."""
        return ActorCall(self, "__init__()", self._handle.build.remote(packed, context, dict(env)))

    def call(self, method: str, arguments: Any, *leading: Any, keep_result: bool = True) -> ActorCall:
        """Start a method; `arguments` is (args, kwargs) or a reference to it; `leading` may be references too.

        Without `keep_result`, the result is dropped in the worker, and None is returned.

        Raises:
            UserError: An argument cannot be pickled.
        """
        daemons.raise_if_dead()
        remote = self._handle.call.options(name=f"{method} [{self.label}]")
        try:
            ref = remote.remote(method, arguments, keep_result, *leading)
        except ray.exceptions.RayError:
            raise
        except Exception as error:  # pickling runs the arguments' own code, which may raise anything
            raise UserError(f"The arguments of {method}() cannot be sent to {self.label}: {error}") from error
        return ActorCall(self, f"{method}()", ref)

    def close(self) -> ActorCall:
        """Start the worker's own `shutdown`."""
        return ActorCall(self, "shutdown()", self._handle.close.remote())

    def kill(self) -> None:
        """Kill the process and its children."""
        if not daemons.is_dead():  # otherwise Ray does not respond, and `wait_exited` ends the process
            with suppress(ray.exceptions.RayError):  # it may already be dead
                ray.kill(self._handle, no_restart=True)
                internal_kv_get_gcs_client().internal_kv_del(self._id.encode(), False, NAMESPACE)

    def is_running_here(self) -> bool:
        """Whether the process is alive and on this host."""
        process = self._process if self.identity is not None else None
        try:
            # `is_running` compares the start since boot, which does not change with the clock, so a reused pid does not count.
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def is_alive(self) -> bool:
        """False once the process is gone, or Ray has reported so for a call."""
        if self._death_seen:
            return False
        if self.identity is not None and self.identity.host == gethostname():
            return self.is_running_here()
        # The public state API requires the dashboard; this is the table that it reads.
        row = ray_internals.state.actors(self._id)
        return bool(row) and row["State"] != "DEAD"

    def note_death(self) -> None:
        """Record that Ray gave up on the actor: a process still running under its pid takes no more calls."""
        self._death_seen = True

    def where(self) -> str:
        """Host and pid."""
        if self.identity is None:
            return "its process has not started"
        return f"host {self.identity.host}, pid {self.identity.pid}"

    def stack(self, timeout_s: float) -> str:
        """What its threads are doing, or why that is unavailable."""
        identity = self.identity
        if identity is None:
            nodes = "; ".join(map(str, live_nodes()))
            return f"nothing yet: Ray has not started its process. It needs {self._needs}. Ray has {nodes}. {_NOT_STARTED}"
        if identity.host == gethostname():
            return daemons.read_stack(identity.pid, identity.stack_file, timeout_s=timeout_s)
        return _stack_elsewhere(identity, timeout_s)

    def log_tail(self, lines: int = 15) -> str:
        """The end of its standard error, if the file is on this host."""
        if self.identity is None or not self.identity.log_file:
            return ""
        log = Path(self.identity.log_file)
        if self.identity.host != gethostname() or not log.is_file():
            return f"Its log: {log} on host {self.identity.host}."
        text = log.read_text(errors="replace").splitlines()
        tail = [line for line in text if line.strip() and not line.startswith((":job_id:", ":actor_name:"))][-lines:]
        return f"The end of its log, {log}:\n" + "\n".join(f"    {line}" for line in tail) if tail else ""


def wait_exited(actors: Sequence[RemoteActor], timeout_s: float = 3.0) -> None:
    """Wait until killed processes on this host are gone, then kill them directly; other nodes do so themselves."""
    here = [actor for actor in actors if actor.identity is not None and actor.identity.host == gethostname()]
    until = time.monotonic() + timeout_s
    while not daemons.is_dead() and any(actor.is_running_here() for actor in here) and time.monotonic() < until:
        time.sleep(0.02)
    if here:
        # Ray asks a process to exit, but a stopped process does not respond. Its children are killed with it.
        orphan_reaper.sweep(MARKER, *(actor.marker for actor in here))


class ActorCall:
    """A pending call on an actor: its method's name in errors, and Ray's reference to the result."""

    def __init__(self, actor: RemoteActor, method: str, ref: Any) -> None:
        self.actor = actor
        self.method = method
        self.ref = ref
        self.started = time.monotonic()
        self.future: Any = None  # Ray's future, if there is one: it has deserialized the result

    def result(self) -> Any:
        """The result of a completed call.

        Raises:
            WorkerError: The worker raised.
            WorkerDiedError: Its process is gone.
            RayDiedError: Ray itself died.
        """
        try:
            result = ray.get(self.ref) if self.future is None else self.future.result()
        except _DEATHS as death:
            daemons.raise_if_dead()
            self.actor.note_death()
            raise self._died(death) from None
        except ray.exceptions.RayError as error:
            daemons.raise_if_dead()
            raise WorkerError(f"{self._headline()}: {type(error).__name__}: {error}") from error
        if isinstance(result, Failure):
            raised = _worker_error(self._headline(), result)
            raised.group = self.actor.group
            if isinstance(raised.__cause__, EngineDiedError):
                self.actor.kill()
                self.actor.note_death()
                raise WorkerDiedError(str(raised)) from raised.__cause__
            raise raised
        return result

    def _headline(self) -> str:
        return f"{self.actor.label}, {self.actor.where()}, failed in {self.method}"

    def _died(self, error: Exception) -> WorkerDiedError:
        # Ray appends a list of possible causes and its own ids: keep only the facts.
        known = str(error).split("Some common causes")[0]
        known = known.split("The actor is dead because")[-1].strip()
        text = f"{self.actor.label}, {self.actor.where()}, died in {self.method}. Ray says: {known}"
        return WorkerDiedError("\n".join(part for part in (text, self.actor.log_tail()) if part))


def _worker_error(headline: str, failure: Failure) -> WorkerError:
    text = f"{headline}: {failure.summary}"
    if failure.exit_code != UserError.exit_code:  # the text of a user error is sufficient without the traceback
        text += f"\n--- its traceback ---\n{failure.traceback.rstrip()}"
    error = WorkerError(text)
    error.exit_code, error.frames = failure.exit_code, failure.frames
    error.raised = failure.summary.rpartition("\n")[2]
    if failure.pickled is not None:
        try:
            error.__cause__ = cause = cloudpickle.loads(failure.pickled)
            error.raised = f"{type(cause).__name__}: {cause}"
        except Exception as unpickling:  # its module may exist only in the worker's Python
            error.add_note(f"(the exception itself cannot be rebuilt here: {unpickling!r})")
    return error


def _stack_elsewhere(identity: Identity, timeout_s: float) -> str:
    """Run a Ray task on the worker's node that reads the stack there."""
    task = ray.remote(daemons.read_stack).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    )
    try:
        ref = task.remote(identity.pid, identity.stack_file, timeout_s=timeout_s / 2)
        return str(ray.get(ref, timeout=timeout_s + 10.0))
    except ray.exceptions.RayError as error:
        return f"no stack: its node does not answer either ({type(error).__name__})"
