"""What the rollouts in progress wait for: for the timeline of a step, idle times, and the error if none of them continues."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from rl_core.errors import DeadlineExceededError
from rl_train.metrics.logger import Timeline
from rl_train.metrics.progress import RolloutCounts

ENGINE, ENVIRONMENT = "the engine", "the environment"
_BINS = 60
"""Number of parts of a step in its timeline."""
_MAX_LISTED = 200
"""Maximum number of rollouts that are listed one by one in an error."""


class RolloutActivity:
    """What one rollout waits for.

    Args:
        log: the rollouts in progress.
        name: the rollout's name in errors.
        driver: what it waits for if it waits for neither the engine nor the environment.
    """

    def __init__(self, log: ActivityLog, name: str, driver: str) -> None:
        self._log, self.name = log, name
        self.waits_for, self.since = driver, perf_counter()
        self.turn = 1
        """The number of the turn, from 1."""

    def sampled(self, tokens: int) -> None:
        """A turn of this many tokens was sampled."""
        self._log.counts.tokens += tokens

    @contextmanager
    def waiting(self, place: str, call: str = "") -> Iterator[None]:
        """The rollout waits during the block.

        Args:
            place: `ENGINE` or `ENVIRONMENT`.
            call: the method that it waits for.
        """
        before = self.waits_for
        self._change(f"{place} ({call})" if call else place, place, 1)
        try:
            yield
        finally:
            self._change(before, place, -1)

    def _change(self, waits_for: str, place: str, by: int) -> None:
        self.waits_for, self.since = waits_for, perf_counter()
        self._log.count(place, by)

    def __str__(self) -> str:
        return f"{self.name}: turn {self.turn}, waits for {self.waits_for}, {perf_counter() - self.since:.1f} s so far"


class ActivityLog:
    """The rollouts in progress, and how many waited for the engine and for the environment over time.

    The event loop of the rollouts writes it; other threads read it.
    """

    def __init__(self) -> None:
        self._rollouts: dict[RolloutActivity, None] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._changes: dict[str, list[tuple[float, int]]] = {ENGINE: [], ENVIRONMENT: []}
        """By place: times at which the number of rollouts changed, and the number since then."""
        self.counts = RolloutCounts()
        """How many rollouts have begun and ended, for the progress of a phase."""
        self.last_change = perf_counter()
        """When a rollout last began, ended, or began or ended to wait."""

    @contextmanager
    def follow(self, name: str, *, driver: str) -> Iterator[RolloutActivity]:
        """A rollout is in progress during the block; arguments as `RolloutActivity`."""
        activity = RolloutActivity(self, name, driver)
        self.last_change = perf_counter()
        with self._lock:
            self._rollouts[activity] = None
            self.counts.begun += 1
        try:
            yield activity
        finally:
            self.last_change = perf_counter()
            with self._lock:
                del self._rollouts[activity]
                self.counts.ended += 1

    def count(self, place: str, by: int) -> None:
        """The number of rollouts that wait at `place` changes now."""
        now = self.last_change = perf_counter()
        with self._lock:
            self._counts[place] += by
            self._changes[place].append((now, self._counts[place]))

    def waiting(self, place: str, start: float, end: float, *, bins: int) -> list[float]:
        """[bins] the mean number of rollouts that waited at `place`, in equal parts of the time from `start` to `end`."""
        width = (end - start) / bins
        totals = [0.0] * bins
        for since, until, number in self._intervals(place, start, end):
            first, last = int((since - start) / width), min(int((until - start) / width), bins - 1)
            for index in range(first, last + 1):
                low, high = start + index * width, start + (index + 1) * width
                totals[index] += number * max(min(until, high) - max(since, low), 0.0)
        return [total / width for total in totals]

    def idle_s(self, place: str, start: float, end: float) -> float:
        """Seconds from `start` to `end` in which no rollout waited at `place`."""
        return sum(until - since for since, until, number in self._intervals(place, start, end) if not number)

    def timeline(self, spans: Sequence[tuple[str, float, float]], start: float, end: float) -> Timeline:
        """The timeline of a step.

        Args:
            spans: the phases of its loop, see `Recorder.spans`.
            start: when it started, in seconds of `time.perf_counter`.
            end: when it ended.
        """
        places = {"engine": ENGINE, "environment": ENVIRONMENT}
        return Timeline(
            seconds=end - start,
            phases=[(name, since - start, until - start) for name, since, until in spans],
            waiting={name: self.waiting(place, start, end, bins=_BINS) for name, place in places.items()},
        )

    def forget_before(self, time: float) -> None:
        """Forget how many rollouts waited before `time`, in seconds of `time.perf_counter`."""
        with self._lock:
            for changes in self._changes.values():
                first = next((index for index, (at, _) in enumerate(changes) if at > time), len(changes))
                del changes[: max(first - 1, 0)]  # the last one before `time` has the number at `time`

    def _intervals(self, place: str, start: float, end: float) -> Iterator[tuple[float, float, int]]:
        with self._lock:
            changes = list(self._changes[place])
        since, number = start, 0
        for at, after in changes:
            if start < at < end:
                yield since, at, number
                since = at
            if at < end:
                number = after
        yield since, end, number

    def describe(self) -> str:
        """One line for each rollout in progress, the one that has waited longest first."""
        with self._lock:
            rollouts = sorted(self._rollouts, key=lambda activity: activity.since)
        lines = [f"  {activity}" for activity in rollouts[:_MAX_LISTED]]
        rest = Counter(activity.waits_for for activity in rollouts[_MAX_LISTED:])
        lines += [f"  {count} more wait for {place}" for place, count in rest.items()]
        return "\n".join([f"Rollouts in progress ({len(rollouts)}):", *lines])

    @contextmanager
    def listed_in_errors(self) -> Iterator[None]:
        """Add the rollouts in progress to the error of an expired deadline."""
        try:
            yield
        except StalledError:
            raise
        except DeadlineExceededError as error:
            raise StalledError(f"{error}\n{self.describe()}") from error

    async def watch(self, rollouts: Awaitable[None], deadline_s: float, awaited_since: Callable[[], float | None]) -> None:
        """Await `rollouts`; raise if no rollout of the run continues for too long while a thread waits for them.

        Args:
            rollouts: ends when they have ended; cancelled if this call ends otherwise.
            deadline_s: the longest time in seconds.
            awaited_since: since when a thread waits, in seconds of `time.perf_counter`; None if none does.

        Raises:
            StalledError: no rollout continued; lists all in progress.
        """
        task = asyncio.ensure_future(rollouts)
        try:
            while not task.done():
                since, now = awaited_since(), perf_counter()
                remaining = deadline_s - (now - max(since, self.last_change)) if since is not None else deadline_s
                if remaining <= 0:
                    raise StalledError(
                        f"No rollout has continued for {deadline_s:g} s, which is more than the deadlines of the engine "
                        "(cluster.deadlines.generate_s) and of the environments (step_timeout_s, agent_timeout_s) allow. "
                        f"rollout.timeout_s limits each rollout.\n{self.describe()}"
                    )
                await asyncio.wait([task], timeout=remaining)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        task.result()


class StalledError(DeadlineExceededError):
    """Rollouts did not continue in time; lists those in progress."""
