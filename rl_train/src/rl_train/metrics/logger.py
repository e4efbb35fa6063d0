"""Loggers of metrics and rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class Logger(ABC):
    """Writes metrics. Called only in the driver, once per step."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the numbers of one step; names are `area/quantity`."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved config, once."""
        return None

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write the rollouts of one step."""
        return None

    def finish(self) -> None:
        """Flush and close; calling it twice is fine."""
        return None
