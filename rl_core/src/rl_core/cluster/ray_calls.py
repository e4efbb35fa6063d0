"""Waits for pending calls on several Ray actors: the first failure ends the wait, and a deadline names those that hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from rl_core.cluster import daemons
from rl_core.cluster.deadlines import Deadlines, exceeded
from rl_core.cluster.remote_actor import ActorCall, resolve
from rl_core.cluster.worker_group import PendingCall, root_cause
from rl_core.errors import WorkerDiedError, WorkerError

# A rank that dies makes its peers fail in their collective, often before Ray notices the death: after the first failure, wait
# this long for the root cause.
_GRACE_S = 5.0


class PendingRayCall(PendingCall):
    """Pending calls, one per actor, in the order of the results; `shape` converts the list of values to the result."""

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

    def poll(self, timeout_s: float) -> bool:
        if not self._errors:
            self._advance(timeout_s)
        if self._errors:
            self._wait_for_root_cause()
            raise self._error()
        return not self._open

    def on_done(self, callback: Callable[[], None]) -> None:
        for call in self._calls:
            call.ref.future().add_done_callback(lambda _: callback())

    def result(self, deadline_s: float | None = None) -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        while not self.poll(max(until - time.monotonic(), 0.0)):
            if time.monotonic() >= until:
                raise self._expired()
        return self._shape([self._values[index] for index in range(len(self._calls))])

    def settle(self, deadline_s: float | None = None) -> list[Any]:
        until = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        while self._open:
            self._advance(max(until - time.monotonic(), 0.0))
            raised = [error for error in self._errors.values() if not isinstance(error, WorkerDiedError)]
            if raised:
                raise raised[0]
            if self._open and time.monotonic() >= until:
                raise self._expired()
        return [self._values.get(index, self._errors.get(index)) for index in range(len(self._calls))]

    def _advance(self, timeout_s: float) -> None:
        """Wait for at least one call to end, and process all that have."""
        if not self._open:
            return
        ready = daemons.wait(list(self._open), num_returns=1, timeout_s=timeout_s)
        if len(ready) and len(self._open) > 1:
            ready, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=0)
        for ref in ready:
            index = self._open.pop(ref)
            outcome = resolve(self._calls[index])
            if outcome.error is None:
                self._values[index] = outcome.value
            else:
                self._errors[index] = outcome.error

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
        return exceeded(round(seconds, 1), reports, answered)


def collect(calls: Sequence[ActorCall], *, deadline_s: float, deadlines: Deadlines) -> list[Any]:
    """The values, in order; errors as in `PendingCall.result`."""
    values: list[Any] = PendingRayCall(calls, deadline_s=deadline_s, deadlines=deadlines).result()
    return values
