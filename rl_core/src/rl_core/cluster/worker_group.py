"""Interface of worker groups, either of Ray actors or of one object in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rl_core.cluster.pending_call import PendingCall
from rl_core.cluster.sharding import NamedSharding
from rl_core.errors import UserError

Leading = Mapping[int, tuple[Any, ...]]
"""The first positional arguments of each called rank."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class WorkerGroup(ABC):
    """Workers of one class on a named grid of ranks.

    Every `run_...` calls a method on some ranks and waits; every `submit_...` starts it and returns a `PendingCall`.
    Each result is returned once, in input order. `deadline_s=None` means the group's default deadline.

    Raises (all calls):
        WorkerError, WorkerDiedError, DeadlineExceededError: as `PendingCall.result`.
    """

    sharding: NamedSharding
    """The grid of ranks."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.sharding.size

    @abstractmethod
    def _submit(
        self, method: str, leading: Leading, shared: Arguments, *, deadline_s: float | None, kept: Collection[int] | None = None
    ) -> PendingCall:
        """Start `method(*leading[rank], *args, **kwargs)` on those ranks, with (args, kwargs) = `shared`.

        Only results of the ranks `kept` (all by default) must be returned; those of others may be None.
        """

    def submit_some(
        self, method: str, args_by_rank: Mapping[int, Any], *, deadline_s: float | None = None, **kwargs: Any
    ) -> PendingCall:
        """Start `method(*args_by_rank[rank], **kwargs)` on those ranks; one result each, in the mapping's order.

        An item that is not a tuple is the only positional argument.
        """
        leading = {rank: item if isinstance(item, tuple) else (item,) for rank, item in args_by_rank.items()}
        return self._submit(method, leading, ((), kwargs), deadline_s=deadline_s)

    def submit_all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Start the method with the same arguments on every rank."""
        return self._submit(method, dict.fromkeys(range(self.world_size), ()), (args, kwargs), deadline_s=deadline_s)

    def submit_one(self, method: str, *args: Any, rank: int = 0, deadline_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Start the method on one rank; the result is that rank's."""
        return self._submit(method, {rank: ()}, (args, kwargs), deadline_s=deadline_s).shaped(lambda values: values[0])

    def submit_sharded(
        self, method: str, shards: Sequence[Any], *args: Any, axis: str = "data", deadline_s: float | None = None, **kwargs: Any
    ) -> PendingCall:
        """Start `method(shards[i], *args, **kwargs)` on every rank whose coordinate on `axis` is i.

        Raises:
            UserError: There is no such axis, or the number of shards does not match its size.
        """
        size = self.sharding.get_axis_size(axis)
        if len(shards) != size:
            raise UserError(
                f"{len(shards)} shards were given for axis {axis!r} of size {size} in {self.sharding}; "
                f"split the batch into exactly {size}"
            )
        others = dict.fromkeys((name for name in self.sharding.names if name != axis), 0)
        kept = [self.sharding.get_ranks_by_coord(**{axis: index}, **others)[0] for index in range(size)]
        items = [(shard,) for shard in shards]
        leading = {rank: items[self.sharding.get_worker_coords(rank)[axis]] for rank in range(self.world_size)}
        call = self._submit(method, leading, (args, kwargs), deadline_s=deadline_s, kept=kept)
        return call.shaped(lambda values: [values[rank] for rank in kept])

    def run_all(self, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call the method with the same arguments on every rank; one result per rank, in rank order."""
        return list(self.submit_all(method, *args, deadline_s=deadline_s, **kwargs).result())

    def run_one(self, method: str, *args: Any, rank: int = 0, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call the method on one rank; returns its result."""
        return self.submit_one(method, *args, rank=rank, deadline_s=deadline_s, **kwargs).result()

    def run_sharded(
        self, method: str, shards: Sequence[Any], *args: Any, axis: str = "data", deadline_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `submit_sharded` and wait: one result per shard, that of the rank whose other coordinates are all 0."""
        return list(self.submit_sharded(method, shards, *args, axis=axis, deadline_s=deadline_s, **kwargs).result())

    def batch_progress(self) -> tuple[int, int] | None:
        """The sum of `GenerationWorker.batch_progress` over the ranks of the latest `generate` call; None if unknown."""
        return self.run_one("batch_progress")  # type: ignore[no-any-return]

    @abstractmethod
    def pids(self) -> list[int]:
        """The process id of each rank, on its host."""

    @abstractmethod
    def describe_rank(self, rank: int) -> str:
        """The name of a rank in errors: its coordinates and group, its host and process."""

    @abstractmethod
    def workers_alive(self) -> list[bool]:
        """For each rank, whether its process is alive."""

    def check_others(self) -> None:  # noqa: B027 - a group in one process has no others
        """Raise `WorkerDiedError` if a rank of another group has died: only engines restart ranks, so this ends the run."""

    @abstractmethod
    def restart(self, rank: int | None = None) -> None:
        """Restart the worker of a rank, or all workers, without their state.

        Ranks that share a process group must be restarted together.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Run each worker's own `shutdown()`, then stop the processes. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
