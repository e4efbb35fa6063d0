"""Collects the metrics of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class Recorder:
    """Collects the metrics of one step; a name recorded twice becomes the mean of its values."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.phase: str | None = None
        """Current phase of the run, for status and error reports; None between two phases."""

    def add(self, metrics: Mapping[str, float | int | torch.Tensor], *, prefix: str = "") -> None:
        """Record metrics named `area/quantity`."""
        for name, value in metrics.items():
            self._values.setdefault(prefix + name, []).append(float(value))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the duration of the block as `time/<phase>_s`; equal names add up. An error leaves `phase` unchanged."""
        outer, self.phase = self.phase, phase
        started = time.perf_counter()
        yield
        name = f"time/{phase}_s"
        before = self._values.get(name, [0.0])[0]
        self._values[name] = [before + time.perf_counter() - started]
        self.phase = outer

    def peek(self) -> dict[str, float]:
        """The metrics of the step so far."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def flush(self) -> dict[str, float]:
        """The metrics of the step; the recorder is empty afterwards."""
        flushed = self.peek()
        self._values.clear()
        return flushed
