"""The state of an actor pool: submitted calls, and the actors that run them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl_core.cluster.remote_actor import ActorCall, RemoteActor
from rl_core.errors import DeadlineExceededError, WorkerDiedError
from rl_train.pools.pool import ActorKey


@dataclass(eq=False, kw_only=True)
class SubmittedCall:
    """A submitted call."""

    method: str
    args: tuple[Any, ...]
    deadline_s: float
    on: ActorKey | None = None
    """The only actor that may run it."""
    future: Future[Any] = field(default_factory=Future)

    def mark_running(self) -> bool:
        """Mark it as running; False if it was cancelled before."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the call with a value or an error, unless it was cancelled."""
        if not self.mark_running():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


@dataclass(eq=False)
class Slot:
    """One slot of the pool: its actor, and the actor's current calls."""

    actor: RemoteActor
    key: ActorKey
    building: ActorCall | None
    """The start of the actor; None once it is ready."""
    until: float
    """Deadline of the start."""
    tries: int = 1
    """Number of actors that were started in a row without becoming ready."""
    failed: bool = False
    """Whether the start failed; another actor is started only once all slots have failed."""
    running: dict[Any, tuple[SubmittedCall, ActorCall, float]] = field(default_factory=dict)
    """By reference: the submitted call, its attempt on this actor, its deadline."""

    def has_capacity(self, max_concurrency: int) -> bool:
        """Whether the actor can take another call."""
        return self.building is None and not self.failed and len(self.running) < max_concurrency


def too_many_starts(
    pool: str, tries: int, max_restarts: int, error: WorkerDiedError | DeadlineExceededError
) -> WorkerDiedError | DeadlineExceededError:
    """The error of an actor whose start failed too often; contains the last error."""
    return type(error)(
        f"pool '{pool}': building the actor failed {tries} {'time' if tries == 1 else 'times, each in a fresh process'} "
        f"(max_restarts={max_restarts}); the last error:\n{error}"
    )
