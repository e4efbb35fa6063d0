"""A call that runs on one or more workers: the first failure ends the wait, and a deadline names the workers that hang.

Does not import Ray before a call on an actor is awaited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from rl_core.cluster.deadlines import Deadlines, deadline_error
from rl_core.errors import WorkerDiedError, WorkerError

if TYPE_CHECKING:
    from rl_core.cluster.remote_actor import ActorCall

# A rank that dies makes its peers fail in their collective, often before Ray notices the death: after the first failure, wait
# this long for the root cause.
_GRACE_S = 5.0


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
    until = time.monotonic() + _GRACE_S
    while any(call._open for call in pending) and time.monotonic() < until:
        if any(isinstance(failure, WorkerDiedError) for failure in failures):
            break
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
