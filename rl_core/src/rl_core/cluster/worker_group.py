"""Groups of workers, as Ray actors or as one object in this process: calls on ranks, deadlines, and errors of ranks.

A call on several workers ends with the first failure, or with a death that explains it; an expired deadline names the workers
that did not answer and what each was doing. Does not import Ray before a call on an actor is awaited.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rl_core.cluster.sharding import NamedSharding
from rl_core.errors import DeadlineExceededError, UserError, WorkerDiedError, WorkerError

if TYPE_CHECKING:
    from rl_core.cluster.remote_actor import ActorCall


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


# A rank that dies makes its peers fail in their collective, often before Ray notices the death: after the first failure, wait
# this long for the root cause, and longer if a process is gone whose death Ray has yet to report.
_GRACE_S, _REPORT_S = 5.0, 60.0


class PendingCall:
    """A call that was started but not awaited.

    Args:
        calls: One per actor, in the order of the results.
        deadline_s: Default deadline of `result` and `settle`, in seconds.
        deadlines: `stack_s` limits how long the stack of a worker that hangs is read.
        shape: Converts the list of values to the result.
    """

    def __init__(
        self, calls: Sequence[ActorCall], *, deadline_s: float, deadlines: Deadlines, shape: Callable[[list[Any]], Any] = list
    ) -> None:
        self._calls = list(calls)
        self._deadline_s = deadline_s
        self._deadlines = deadlines
        self._shape = shape
        self._open = {call.ref: index for index, call in enumerate(self._calls)}
        self._values: dict[int, Any] = {}
        self._errors: dict[int, WorkerError] = {}

    @classmethod
    def completed(cls, value: Any, error: WorkerError | None, *, shape: Callable[[list[Any]], Any] = list) -> Self:
        """A call on one worker in this process, which has returned a value or failed."""
        call = cls([], deadline_s=0.0, deadlines=Deadlines(), shape=shape)
        if error is None:
            call._values[0] = value
        else:
            call._errors[0] = error
        return call

    def shaped(self, shape: Callable[[list[Any]], Any]) -> Self:
        """This call, whose result is `shape` of the list of values."""
        self._shape = shape
        return self

    def poll(self, timeout_s: float) -> bool:
        """Whether every worker has answered; waits up to `timeout_s`.

        Raises:
            WorkerError: A worker raised or died; raised immediately, even if others are still busy.
        """
        return poll_together([self], timeout_s)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a worker has answered or failed, in any thread; at once if that has already happened.

        With several workers it is called for each. It may be called slightly before `poll` returns True.
        """
        for call in self._calls:
            call.future = call.ref.future()
            call.future.add_done_callback(lambda _: callback())
        if not self._calls:
            callback()

    def result(self, deadline_s: float | None = None) -> Any:
        """The result of the call, as returned by the corresponding `run_...` method.

        Args:
            deadline_s: Seconds from now; None for the default.

        Raises:
            WorkerError: A worker raised; WorkerDiedError if its process is gone.
            DeadlineExceededError: Some did not answer in time; names them with their stacks.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        while not self.poll(max(until - time.monotonic(), 0.0)):
            if time.monotonic() >= until:
                raise self._expired()
        return self._shape([self._values[index] for index in sorted(self._values)])

    def settle(self, deadline_s: float | None = None) -> list[Any]:
        """One entry per called worker: its answer, or the WorkerDiedError of one that died.

        As `result`, but a death does not end the wait for the others, and their answers are kept.
        """
        until = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        while True:
            _advance([self], max(until - time.monotonic(), 0.0))
            raised = [error for error in self._errors.values() if not isinstance(error, WorkerDiedError)]
            if raised:
                raise raised[0]
            if not self._open:
                answers = self._values | self._errors
                return [answers[index] for index in sorted(answers)]
            if time.monotonic() >= until:
                raise self._expired()

    def _finish(self, ref: Any) -> None:
        index = self._open.pop(ref)
        try:
            self._values[index] = self._calls[index].result()
        except WorkerError as error:
            self._errors[index] = error

    def _expired(self) -> Exception:
        waiting = [self._calls[index] for index in sorted(self._open.values())]
        answered = [self._calls[index].actor.label for index in sorted(self._values)]
        return deadline_error(waiting, answered, stack_s=self._deadlines.stack_s)


def poll_together(pending: Sequence[PendingCall], timeout_s: float) -> bool:
    """Whether every worker of all these calls has answered; waits up to `timeout_s`.

    Raises:
        WorkerError: A worker raised or died; raised immediately, even if others are still busy.
    """
    if not any(call._errors for call in pending):
        _advance(pending, timeout_s)
    failures = _errors_of(pending)
    if failures:
        raise _wait_for_root_cause(pending, failures)
    return not any(call._open for call in pending)


def _advance(pending: Sequence[PendingCall], timeout_s: float) -> None:
    """Wait for at least one worker to answer, and process all answers."""
    calls = {ref: call for call in pending for ref in call._open}
    if not calls:
        return
    from rl_core.cluster import daemons

    for ref in daemons.wait(list(calls), timeout_s=timeout_s):
        calls[ref]._finish(ref)


def _wait_for_root_cause(pending: Sequence[PendingCall], failures: list[WorkerError]) -> WorkerError:
    """A death, which explains the other failures and may be noticed after them; else the first of `failures`."""
    until, is_extended = time.monotonic() + _GRACE_S, False
    while waiting := [call._calls[index] for call in pending for index in call._open.values()]:
        if any(isinstance(failure, WorkerDiedError) for failure in failures):
            break
        if time.monotonic() >= until:
            if is_extended or all(call.actor.is_alive() for call in waiting):
                break
            until, is_extended = until + _REPORT_S, True
        _advance(pending, max(until - time.monotonic(), 0.0))
        failures += [error for error in _errors_of(pending) if error not in failures]
    cause = root_cause(failures)
    for call in pending:
        if len(call._errors) > 1 and cause in call._errors.values():
            call._errors = {0: cause}  # reported only once
    return cause


def _errors_of(pending: Sequence[PendingCall]) -> list[WorkerError]:
    return [error for call in pending for error in call._errors.values()]


def root_cause(failures: Sequence[WorkerError]) -> WorkerError:
    """The failure that explains the others: a death, else the first one; its text includes the others."""
    cause = next((failure for failure in failures if isinstance(failure, WorkerDiedError)), failures[0])
    others = [str(other).splitlines()[0] for other in failures if other is not cause]
    if others:
        cause.args = ("\n".join([str(cause), "Also failed:", *(f"- {line}" for line in others)]),)
    return cause


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Maximum seconds for each kind of remote work.

    Attributes:
        start_s: From requesting a process until its worker is built (including model loading).
        call_s: One call of a worker's method, unless the call sets its own.
        stop_s: A worker's own `shutdown()`; afterwards its process is killed.
        stack_s: Reading the stack of a worker that does not answer.
    """

    start_s: float = 900.0
    call_s: float = 3600.0
    stop_s: float = 15.0
    stack_s: float = 10.0

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if not value > 0}
        if wrong:
            raise UserError(f"a deadline is a positive number of seconds, found {wrong}")


def deadline_error(waiting: Sequence[ActorCall], answered: Sequence[str], *, stack_s: float) -> DeadlineExceededError:
    """The error for an expired deadline, with the workers that did not answer, what each was doing, and those that did.

    Args:
        waiting: The calls without an answer.
        answered: Labels of the workers that answered.
        stack_s: Limit of reading the stack of a worker, in seconds.
    """
    seconds = [time.monotonic() - call.started for call in waiting]
    with ThreadPoolExecutor(max_workers=16) as looks:  # reading a stack on another node takes seconds
        stacks = list(looks.map(lambda call: call.actor.stack(stack_s), waiting))
    methods = sorted({call.method for call in waiting})
    lines = [
        f"{', '.join(methods)} did not finish within {round(max(seconds), 1):g} s: "
        f"{len(waiting)} of {len(waiting) + len(answered)} workers did not answer."
    ]
    for call, waited, stack in zip(waiting, seconds, stacks, strict=True):
        lines.append(f"- {call.actor.label}, {call.actor.where()}, in {call.method} for {waited:.1f} s; what it was doing:")
        lines += [f"    {line}" for line in stack.splitlines()]
    lines.append(f"Answered: {', '.join(answered) or 'none'}.")
    lines.append(
        "If the work just takes long, raise the deadline. If ranks wait for each other, look for the one with a different "
        "stack. A worker that did not answer stays busy: restart or shut down its group."
    )
    return DeadlineExceededError("\n".join(lines))
