"""The driver's handle of one worker process: start, call, look at, end. Knows neither groups nor pools."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.cluster import daemons, orphan_reaper, stacks
from rl_core.cluster.actor_host import MARKER, ActorHost, Failure, Identity
from rl_core.cluster.deadlines import Unanswered
from rl_core.errors import EngineDiedError, UserError, WorkerDiedError, WorkerError
from rl_core.interfaces.worker_context import WorkerContext

_DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
)

_CLOCK_S = 2.0
"""By how much a process may seem older or younger than it said: both count from the time of the boot, which the kernel gives in
whole seconds and corrects with the clock. A pid does not come back so soon."""


def pack_worker(worker_class: type, kwargs: Mapping[str, Any]) -> Any:
    """A reference to the pickled class and its keyword arguments, stored once for all workers."""
    return ray.put(cloudpickle.dumps((plain_class(worker_class), dict(kwargs))))


def plain_class(worker_class: Any) -> type:
    """The class itself, also of one that arrives already wrapped in `@ray.remote`."""
    if isinstance(worker_class, ray.actor.ActorClass):
        wrapped: type = worker_class.__ray_metadata__.modified_class
        return wrapped
    found: type = worker_class
    return found


def is_wrapped(worker_class: Any) -> bool:
    """True of a class that arrives wrapped in `@ray.remote`."""
    return isinstance(worker_class, ray.actor.ActorClass)


def own_options(worker_class: Any) -> dict[str, Any]:
    """The options that a class wrapped in `@ray.remote(...)` asks for, without those that a pool or group decides."""
    if not isinstance(worker_class, ray.actor.ActorClass):
        return {}
    decided = {
        "name", "namespace", "get_if_exists", "lifetime", "max_restarts", "max_task_retries", "max_concurrency",
        "max_pending_calls", "concurrency_groups", "enable_task_events", "_metadata",
    }  # fmt: skip
    options = worker_class._default_options
    return {key: value for key, value in options.items() if key not in decided and value is not None}


class RemoteActor:
    """One worker process.

    Args:
        label: How errors and logs name it, such as "rank 1 (data=1) of 'policy'".
        options: Ray actor options (CPUs, GPUs, placement).
        env: Environment variables that its process starts with.
        runtime_env: Ray runtime environment, such as another Python.

    Attributes:
        group: The group or pool that it belongs to.
        marker: By which `guard` knows its process and what that starts.
    """

    def __init__(
        self,
        label: str,
        *,
        options: Mapping[str, Any],
        env: Mapping[str, str],
        runtime_env: Mapping[str, Any],
        group: str = "",
    ) -> None:
        daemons.raise_if_dead()
        self.label = label
        self.group = group
        self._identity: Identity | None = None
        self._death_seen = False
        self.marker = uuid.uuid4().hex
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

    @property
    def identity(self) -> Identity | None:
        """Which process it is; None until that has started."""
        if self._identity is None and ray.wait([self._identity_ref], timeout=0)[0]:
            self._identity = resolve(self.started()).value
        return self._identity

    def started(self) -> ActorCall:
        """The wait for its process."""
        return ActorCall(self, "start", self._identity_ref)

    def find_port(self) -> ActorCall:
        """Asks for a port that is free on its node."""
        return ActorCall(self, "find a port", self._handle.find_port.remote())

    def build(self, packed: Any, context: WorkerContext, env: Mapping[str, str]) -> ActorCall:
        """Makes the worker from `pack_worker`'s reference."""
        return ActorCall(self, "__init__()", self._handle.build.remote(packed, context, dict(env)))

    def call(self, method: str, arguments: Any, *leading: Any, keep_result: bool = True) -> ActorCall:
        """Starts a method; `arguments` is (args, kwargs) or a reference to it, `leading` may be references too.

        Without `keep_result` its result is dropped where it was made and None arrives.
        """
        daemons.raise_if_dead()
        remote = self._handle.call.options(name=f"{method} [{self.label}]")
        return ActorCall(self, f"{method}()", remote.remote(method, arguments, keep_result, *leading))

    def close(self) -> ActorCall:
        """Starts the worker's own `shutdown`."""
        return ActorCall(self, "shutdown()", self._handle.close.remote())

    def kill(self) -> None:
        """Ends the process at once, and what it started."""
        if not daemons.is_dead():  # then Ray hears nothing, and `wait_gone` ends the process
            ray.kill(self._handle, no_restart=True)

    def process_here(self) -> psutil.Process | None:
        """The process, where it runs on this host and is not gone."""
        identity = self.identity
        if identity is None or identity.host != gethostname():
            return None
        try:
            process = psutil.Process(identity.pid)
            same = abs(process.create_time() - identity.created) < _CLOCK_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def is_alive(self) -> bool:
        """False once the process is gone, or Ray has said so of a call on it."""
        if self._death_seen:
            return False
        if self.identity is not None and self.identity.host == gethostname():
            return self.process_here() is not None
        # The public state API needs the dashboard; this is the table that it reads.
        row = ray._private.state.actors(self._handle._actor_id.hex())
        return bool(row) and row["State"] != "DEAD"

    def note_death(self) -> None:
        """Ray gave up on it: what is still running under its pid, if anything, takes no more calls."""
        self._death_seen = True

    def where(self) -> str:
        """Host and pid."""
        if self.identity is None:
            return "its process has not started"
        return f"host {self.identity.host}, pid {self.identity.pid}"

    def stack(self, timeout_s: float) -> str:
        """What its threads are doing, or why that cannot be seen."""
        identity = self.identity
        if identity is None:
            return "nothing yet: Ray has not started its process (no free resources, or its environment is being made)"
        if identity.host == gethostname():
            return stacks.read_stack(identity.pid, identity.stack_file, timeout_s=timeout_s)
        return _stack_elsewhere(identity, timeout_s)

    def log_tail(self, lines: int = 15) -> str:
        """The end of its standard error, where that is on this host."""
        if self.identity is None or not self.identity.log_file:
            return ""
        log = Path(self.identity.log_file)
        if self.identity.host != gethostname() or not log.is_file():
            return f"Its log: {log} on host {self.identity.host}."
        text = log.read_text(errors="replace").splitlines()
        tail = [line for line in text if line.strip() and not line.startswith((":job_id:", ":actor_name:"))][-lines:]
        return f"The end of its log, {log}:\n" + "\n".join(f"    {line}" for line in tail) if tail else ""


def wait_gone(actors: Sequence[RemoteActor], timeout_s: float = 3.0) -> None:
    """Waits for the end of killed processes on this host, then insists; elsewhere their nodes see to it."""
    here = [actor for actor in actors if actor.identity is not None and actor.identity.host == gethostname()]
    until = time.monotonic() + timeout_s
    while not daemons.is_dead() and any(actor.process_here() is not None for actor in here) and time.monotonic() < until:
        time.sleep(0.02)
    if here:
        # Ray asks a process to exit; one that is stopped does not hear it. With it goes what it started.
        orphan_reaper.sweep(MARKER, *(actor.marker for actor in here))


class ActorCall:
    """One call under way on one actor.

    Attributes:
        actor: Who runs it.
        method: What, as errors name it.
        ref: Ray's reference to the result.
    """

    def __init__(self, actor: RemoteActor, method: str, ref: Any) -> None:
        self.actor = actor
        self.method = method
        self.ref = ref
        self.started = time.monotonic()

    def resolve(self) -> Any:
        """The result of a call that is done.

        Raises:
            WorkerError: The worker raised.
            WorkerDiedError: Its process is gone.
            RayDiedError: So is Ray.
        """
        try:
            result = ray.get(self.ref)
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

    def unanswered(self, stack_s: float) -> Unanswered:
        """The line of a deadline's report."""
        seconds = time.monotonic() - self.started
        return Unanswered(
            who=self.actor.label,
            where=self.actor.where(),
            method=self.method,
            seconds=seconds,
            doing=self.actor.stack(stack_s),
        )

    def _headline(self) -> str:
        return f"{self.actor.label}, {self.actor.where()}, failed in {self.method}"

    def _died(self, error: Exception) -> WorkerDiedError:
        # Ray appends a list of guesses and its own ids: keep what it knows.
        known = str(error).split("Some common causes")[0]
        known = known.split("The actor is dead because")[-1].strip()
        text = f"{self.actor.label}, {self.actor.where()}, died in {self.method}. Ray says: {known}"
        return WorkerDiedError("\n".join(part for part in (text, self.actor.log_tail()) if part))


@dataclass(frozen=True)
class _Outcome:
    """A flight that ended: its value, or what it raised."""

    value: Any = None
    error: WorkerError | None = None


def resolve(flight: ActorCall) -> _Outcome:
    """Like `ActorCall.resolve`, but the error is kept instead of raised."""
    try:
        return _Outcome(value=flight.resolve())
    except WorkerError as error:
        return _Outcome(error=error)


def _worker_error(headline: str, failure: Failure) -> WorkerError:
    text = f"{headline}: {failure.summary}"
    if failure.exit_code != UserError.exit_code:  # a user's mistake is explained by its text; where it was found helps nobody
        text += f"\n--- its traceback ---\n{failure.traceback.rstrip()}"
    error = WorkerError(text)
    error.exit_code = failure.exit_code
    if failure.pickled is not None:
        try:
            error.__cause__ = cloudpickle.loads(failure.pickled)
        except Exception as unpickling:  # its module may exist in the worker's Python alone
            error.add_note(f"(the exception itself cannot be rebuilt here: {unpickling!r})")
    return error


def _stack_elsewhere(identity: Identity, timeout_s: float) -> str:
    """Sends a task to the worker's node that looks from there."""
    task = ray.remote(stacks.read_stack).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(identity.node_id, soft=False),
    )
    try:
        ref = task.remote(identity.pid, identity.stack_file, timeout_s=timeout_s / 2)
        return str(ray.get(ref, timeout=timeout_s + 10.0))
    except ray.exceptions.RayError as error:
        return f"no stack: its node does not answer either ({type(error).__name__})"
