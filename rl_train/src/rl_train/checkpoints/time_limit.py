"""Decides whether a run with a time limit can start another step. Does not read the clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TimeLimit:
    """Ends a run in time, assuming the longest step and the longest checkpoint so far.

    Until the first checkpoint, saving one is assumed to take as long as a step.
    """

    seconds: float
    """Time limit from `started`."""
    started: float
    """When it started, on the clock of the other methods' `now`."""
    _longest_step: float = field(default=0.0, init=False)
    _longest_save: float | None = field(default=None, init=False)

    def count_step(self, seconds: float) -> None:
        """Record the duration of a step, including validation."""
        self._longest_step = max(self._longest_step, seconds)

    def count_save(self, seconds: float) -> None:
        """Record the duration of a checkpoint."""
        self._longest_save = max(self._longest_save or 0.0, seconds)

    def allows_step(self, now: float) -> bool:
        """Whether another step and its checkpoint are expected to end within the limit."""
        save = self._longest_step if self._longest_save is None else self._longest_save
        return now - self.started + self._longest_step + save <= self.seconds
