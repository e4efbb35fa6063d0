"""Loggers of metrics and rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rl_train.metrics.timeline import Timeline


class Logger(ABC):
    """Writes metrics and rollouts. Called only in the driver process; an exception of a method ends the run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of one step.

        Args:
            metrics: Values by name, such as `reward/mean`; docs/metrics.md has their units. May contain NaN and infinities.
            step: The finished step; 0 is the validation before the first one.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved config, without secrets; called once, before the first step."""
        return None

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rollouts of one step, at most `logger.num_rollouts_logged`.

        Args:
            rows: One JSON-ready record per rollout, with `prompt`, `completion`, `messages`, `answer`, `reward` and the other
                keys of the table in docs/report.md, "Keys of a rollout".
            step: As in `log_metrics`.
        """
        return None

    def log_timeline(self, timeline: Timeline, step: int) -> None:
        """Write when the phases of a step ran, and what its rollouts waited for; only for runs with rollouts."""
        return None

    def finish(self) -> None:
        """Flush and close; calling it twice is fine.

        If an error or an interruption ends the run, it is called while that exception is handled: `sys.exception()` returns it.
        """
        return None
