"""Waits for calls of several worker groups that depend on each other, such as the two ends of a broadcast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rl_core.cluster.pending_call import PendingCall, root_cause
from rl_core.errors import DeadlineExceededError, WorkerDiedError, WorkerError

# A rank that dies makes its peers in other groups fail in their collective, often before its own death is noticed: after the
# first failure, wait this long for the root cause.
_GRACE_S = 5.0


def wait_together(pending: Sequence[PendingCall], deadline_s: float) -> list[Any]:
    """The results of calls of several groups that depend on each other, such as the two ends of a broadcast.

    Awaiting them one after the other would wait for the first one's deadline even if the second has already failed.

    Raises:
        WorkerError: The first failure, immediately; or a death that is noticed soon after, since it explains the others.
        DeadlineExceededError: Names all workers that did not answer, of every group.
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
