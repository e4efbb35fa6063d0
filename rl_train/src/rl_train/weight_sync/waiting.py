"""Waits for calls of several worker groups that depend on each other, such as the two ends of a broadcast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rl_core.cluster.pending_call import PendingCall, poll_together
from rl_core.errors import DeadlineExceededError


def wait_together(pending: Sequence[PendingCall], deadline_s: float) -> list[Any]:
    """The results of calls of several groups that depend on each other, such as the two ends of a broadcast.

    Awaiting them one after the other would wait for the first one's deadline even if the second has already failed.

    Raises:
        WorkerError: The first failure, immediately; or a death that is noticed soon after, since it explains the others.
        DeadlineExceededError: Names all workers that did not answer, of every group.
    """
    until = time.monotonic() + deadline_s
    while not poll_together(pending, max(until - time.monotonic(), 0.0)):
        reports = [text for call in pending if time.monotonic() >= until and (text := _expired(call)) is not None]
        if reports:
            raise DeadlineExceededError(f"after {deadline_s:g} s together:\n" + "\n".join(reports))
    return [call.result() for call in pending]


def _expired(call: PendingCall) -> str | None:
    try:
        call.result(deadline_s=0.0)
    except DeadlineExceededError as error:
        return str(error)
    return None


def wait_for_each(pending: Sequence[Any], deadline_s: float) -> None:
    """Wait for `concurrent.futures` futures, if no worker group provides pending calls."""
    end = time.monotonic() + deadline_s
    for call in pending:
        call.result(timeout=max(end - time.monotonic(), 0.0))
