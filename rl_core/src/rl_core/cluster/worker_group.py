"""The face of a group of workers, whether they are Ray actors or one object in this process; knows neither."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rl_core.cluster.sharding import NamedSharding
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError, WorkerError

# A rank that dies makes its peers in other groups fail in their collective, often before its own death is seen: after the
# first failure, wait this long for the root cause.
_GRACE_S = 5.0


class PendingCall(ABC):
    """A call that was started and not awaited."""

    @abstractmethod
    def poll(self, timeout_s: float) -> bool:
        """True once every worker has answered; looks for that long at most.

        Raises:
            WorkerError: A worker raised or died, as soon as that is seen, whoever else is still busy.
        """

    @abstractmethod
    def result(self, deadline_s: float | None = None) -> Any:
        """What the call gives, of the form that its `run_...` twin returns.

        Args:
            deadline_s: Seconds from now; None for the group's own deadline.

        Raises:
            WorkerError: A worker raised; WorkerDiedError where its process is gone.
            DeadlineExceededError: Some did not answer in time; names them with their stacks.
        """

    @abstractmethod
    def settle(self, deadline_s: float | None = None) -> list[Any]:
        """One entry for each worker that was called: what it answered, or the WorkerDiedError of one that died.

        Unlike in `result`, the death of one does not end the wait for the others, whose answers are not lost.

        Args:
            deadline_s: Seconds from now; None for the group's own deadline.

        Raises:
            WorkerError: A worker raised.
            DeadlineExceededError: Some did not answer in time; names them with their stacks.
        """


class WorkerGroup(ABC):
    """Workers of one class on a named grid of ranks.

    Every `run_...` starts a method on some ranks and waits; every `submit_...` starts it and returns a `PendingCall`.
    Results come back once each, in input order. `deadline_s=None` means the group's own deadline of a call.

    Raises (all calls):
        WorkerError, WorkerDiedError, DeadlineExceededError: as `PendingCall.result`.
    """

    @property
    @abstractmethod
    def sharding(self) -> NamedSharding:
        """The grid of ranks."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.sharding.size

    @abstractmethod
    def submit_each(
        self, method: str, per_rank_args: Sequence[Any], *, deadline_s: float | None = None, **kwargs: Any
    ) -> PendingCall:
        """Starts `method(*per_rank_args[rank], **kwargs)` on every rank; an item that is no tuple is the one argument."""

    @abstractmethod
    def submit_some(
        self, method: str, args_by_rank: Mapping[int, Any], *, deadline_s: float | None = None, **kwargs: Any
    ) -> PendingCall:
        """Starts `method(*args_by_rank[rank], **kwargs)` on those ranks alone; one result each, in the mapping's order."""

    @abstractmethod
    def submit_all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Starts the method with the same arguments on every rank."""

    @abstractmethod
    def submit_one(self, method: str, *args: Any, rank: int = 0, deadline_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Starts the method on one rank; its result is that rank's."""

    @abstractmethod
    def submit_sharded(
        self,
        method: str,
        shards: Sequence[Any],
        *args: Any,
        axis: str = "data",
        deadline_s: float | None = None,
        **kwargs: Any,
    ) -> PendingCall:
        """Starts `method(shards[i], *args, **kwargs)` on every rank whose coordinate on `axis` is i."""

    def run_all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """The method with the same arguments on every rank; one result a rank, in rank order."""
        results: list[Any] = self.submit_all(method, *args, deadline_s=deadline_s, **kwargs).result()
        return results

    def run_one(self, method: str, *args: Any, rank: int = 0, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """The method on one rank; its result."""
        return self.submit_one(method, *args, rank=rank, deadline_s=deadline_s, **kwargs).result()

    def run_each(
        self, method: str, per_rank_args: Sequence[Any], *, deadline_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """`method(*per_rank_args[rank], **kwargs)` on every rank; one result a rank, in rank order.

        An item that is no tuple is the one positional argument.
        """
        results: list[Any] = self.submit_each(method, per_rank_args, deadline_s=deadline_s, **kwargs).result()
        return results

    def run_sharded(
        self,
        method: str,
        shards: Sequence[Any],
        *args: Any,
        axis: str = "data",
        deadline_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """`method(shards[i], *args, **kwargs)` on every rank whose coordinate on `axis` is i.

        The shard is replicated over the other axes. One result a shard, in shard order: that of the rank whose
        other coordinates are all 0.

        Raises:
            UserError: There is no such axis, or the shards are not as many as it is long.
        """
        pending = self.submit_sharded(method, shards, *args, axis=axis, deadline_s=deadline_s, **kwargs)
        results: list[Any] = pending.result()
        return results

    @abstractmethod
    def pids(self) -> list[int]:
        """The process id of each rank, on its own host."""

    @abstractmethod
    def describe_rank(self, rank: int) -> str:
        """How errors name that rank: its coordinates and group, its host and process."""

    @abstractmethod
    def workers_alive(self) -> list[bool]:
        """For each rank, whether its process lives."""

    @abstractmethod
    def restart(self, rank: int | None = None) -> None:
        """Ends the worker and builds it anew in its place, without its state; every worker where `rank` is None.

        Ranks that have met in a process group must be restarted together.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Runs each worker's own `shutdown()`, then ends the processes. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


def wait_together(pending: Sequence[PendingCall], deadline_s: float) -> list[Any]:
    """The results of calls of several groups that need each other, such as the two ends of a broadcast.

    Awaiting one after the other would sit out the first one's deadline when the second has already failed.

    Raises:
        WorkerError: The first failure of any, at once; a death, where one is seen soon after, since it explains the others.
        DeadlineExceededError: Names all that did not answer, of every group.
    """
    until = time.monotonic() + deadline_s
    open_calls = list(pending)
    failures: list[WorkerError] = []
    while open_calls and time.monotonic() < until:
        slice_s = min(0.05, max(until - time.monotonic(), 0.0))
        before = len(failures)
        open_calls = [call for call in open_calls if not _ended(call, slice_s, failures)]
        if any(isinstance(failure, WorkerDiedError) for failure in failures):
            break
        if failures and before == 0:
            until = min(until, time.monotonic() + _GRACE_S)
    if failures:
        raise root_cause(failures)
    reports = [text for call in open_calls if (text := _expired(call)) is not None]
    if reports:
        raise DeadlineExceededError(f"after {deadline_s:g} s together:\n" + "\n".join(reports))
    return [call.result() for call in pending]


def root_cause(failures: Sequence[WorkerError]) -> WorkerError:
    """The failure that explains the others: a death, else the first that was seen; its text names the others."""
    cause = next((failure for failure in failures if isinstance(failure, WorkerDiedError)), failures[0])
    others = [str(other).splitlines()[0] for other in failures if other is not cause]
    if others:
        cause.args = ("\n".join([str(cause), "Also failed:", *(f"- {line}" for line in others)]),)
    return cause


def _ended(call: PendingCall, timeout_s: float, failures: list[WorkerError]) -> bool:
    try:
        return call.poll(timeout_s)
    except WorkerError as error:
        failures.append(error)
        return True


def _expired(call: PendingCall) -> str | None:
    try:
        call.result(deadline_s=0.0)
    except DeadlineExceededError as error:
        return str(error)
    return None


def check_shards(sharding: NamedSharding, shards: Sequence[Any], axis: str) -> None:
    """One shard for each coordinate of the axis, or a UserError."""
    size = sharding.get_axis_size(axis)
    if len(shards) != size:
        raise UserError(
            f"{len(shards)} shards were given for axis {axis!r} of size {size} in {sharding}; "
            f"split the batch into exactly {size}"
        )


def check_per_rank(sharding: NamedSharding, per_rank_args: Sequence[Any]) -> None:
    """One item for each rank, or a UserError."""
    if len(per_rank_args) != sharding.size:
        raise UserError(f"{len(per_rank_args)} per-rank arguments were given for {sharding.size} ranks; give one each")
