"""A call that runs on one or more workers: the first failure ends the wait, and a deadline names the workers that hang.

Does not import Ray before a call on an actor is awaited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    def poll(self, timeout_s: float) -> bool:
        """Whether every worker has answered; waits up to `timeout_s`.

        Raises:
            WorkerError: A worker raised or died; raised immediately, even if others are still busy.
        """
        if not self._errors:
            self._advance(timeout_s)
        if self._errors:
            self._wait_for_root_cause()
            raise self._error()
        return not self._open

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a worker has answered or failed, in any thread; at once if that has already happened.

        With several workers it is called for each. It may be called slightly before `poll` returns True.
        """
        for call in self._calls:
            call.ref.future().add_done_callback(lambda _: callback())
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
            self._advance(max(until - time.monotonic(), 0.0))
            raised = [error for error in self._errors.values() if not isinstance(error, WorkerDiedError)]
            if raised:
                raise raised[0]
            if not self._open:
                break
            if time.monotonic() >= until:
                raise self._expired()
        answers = self._values | self._errors
        return [answers[index] for index in sorted(answers)]

    def _advance(self, timeout_s: float) -> None:
        """Wait for at least one call to end, and process all that have."""
        if not self._open:
            return
        from rl_core.cluster import daemons

        for ref in daemons.wait(list(self._open), timeout_s=timeout_s):
            index = self._open.pop(ref)
            try:
                self._values[index] = self._calls[index].result()
            except WorkerError as error:
                self._errors[index] = error

    def _wait_for_root_cause(self) -> None:
        until = time.monotonic() + _GRACE_S
        while self._open and not self._death() and time.monotonic() < until:
            self._advance(max(until - time.monotonic(), 0.0))

    def _death(self) -> WorkerDiedError | None:
        return next((error for error in self._errors.values() if isinstance(error, WorkerDiedError)), None)

    def _error(self) -> WorkerError:
        """A death, which explains the other failures; else the first failure."""
        error = root_cause(list(self._errors.values()))
        if len(self._errors) > 1:
            self._errors = {0: error}  # reported only once
        return error

    def _expired(self) -> Exception:
        waiting = [self._calls[index] for index in sorted(self._open.values())]
        answered = [self._calls[index].actor.label for index in sorted(self._values)]
        seconds = max(time.monotonic() - call.started for call in waiting)
        with ThreadPoolExecutor(max_workers=16) as looks:  # reading a stack on another node takes seconds
            reports = list(looks.map(lambda call: call.unanswered(self._deadlines.stack_s), waiting))
        return deadline_error(round(seconds, 1), reports, answered)


def collect(calls: Sequence[ActorCall], *, deadline_s: float, deadlines: Deadlines) -> list[Any]:
    """The values, in order; errors as in `PendingCall.result`."""
    values: list[Any] = PendingCall(calls, deadline_s=deadline_s, deadlines=deadlines).result()
    return values


def root_cause(failures: Sequence[WorkerError]) -> WorkerError:
    """The failure that explains the others: a death, else the first one; its text includes the others."""
    cause = next((failure for failure in failures if isinstance(failure, WorkerDiedError)), failures[0])
    others = [str(other).splitlines()[0] for other in failures if other is not cause]
    if others:
        cause.args = ("\n".join([str(cause), "Also failed:", *(f"- {line}" for line in others)]),)
    return cause
