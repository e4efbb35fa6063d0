"""Whether a run may begin another step, if it must have ended with a checkpoint by a given time; reads no clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TimeLimit:
    """Ends a run in time, by the longest step and the longest checkpoint so far.

    Until a checkpoint is written, writing one is taken to last as long as a step.
    """

    seconds: float
    """How long the run may take from `started`."""
    started: float
    """When it started, on the clock of the other methods' `now`."""
    _longest_step: float = field(default=0.0, init=False)
    _longest_save: float | None = field(default=None, init=False)

    def count_step(self, seconds: float) -> None:
        """Take in how long a step took, its validation included."""
        self._longest_step = max(self._longest_step, seconds)

    def count_save(self, seconds: float) -> None:
        """Take in how long a checkpoint took."""
        self._longest_save = max(self._longest_save or 0.0, seconds)

    def allows_step(self, now: float) -> bool:
        """Whether another step and its checkpoint are expected to end within the limit."""
        save = self._longest_step if self._longest_save is None else self._longest_save
        return now - self.started + self._longest_step + save <= self.seconds
