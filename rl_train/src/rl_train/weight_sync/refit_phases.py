"""The phases of a refit: how long each takes, and who is responsible for an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_core.errors import WeightSyncError, WorkerDiedError, WorkerError


@contextmanager
def attributed(transport: str) -> Iterator[None]:
    """Report rejected weights as a failed refit; a worker's death or an expired deadline keeps its own error."""
    try:
        yield
    except WorkerDiedError:
        raise
    except WorkerError as error:
        raise WeightSyncError(f"The refit by {transport} failed in a worker, so weights are unverified.\n{error}") from error


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the duration of the block to `seconds[phase]`, unless it raises."""
    started = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - started
