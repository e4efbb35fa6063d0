"""Collects the metrics of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rl_train.metrics.peak_memory import PeakMemory
from rl_train.metrics.progress import Progress


class Recorder:
    """Collects the metrics of one step; a name recorded twice becomes the mean of its values."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Phase, start and end, in seconds of `time.perf_counter`, of each block of the step that was timed."""
        self.progress = Progress()
        """What the run is doing now."""
        self.memory: PeakMemory | None = None
        """Measures the memory of each phase, if it is set."""

    def add(self, metrics: Mapping[str, float | int | torch.Tensor], *, prefix: str = "") -> None:
        """Record metrics named `area/quantity`."""
        for name, value in metrics.items():
            self._values.setdefault(prefix + name, []).append(float(value))

    @property
    def phase(self) -> str | None:
        """Current phase of the run, for status and error reports; None between two phases."""
        return self.progress.phase

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the duration of the block as `time/<phase>_s`; equal names add up. An error leaves `phase` unchanged.

        The memory of the block is recorded as `memory/<phase>_gib`, which is the largest value for equal names.
        """
        outer = self.progress.phase
        self.progress.begin(phase)
        started = time.perf_counter()
        yield
        name, ended = f"time/{phase}_s", time.perf_counter()
        before = self._values.get(name, [0.0])[0]
        self._values[name] = [before + ended - started]
        self.spans.append((phase, started, ended))
        if self.memory is not None:
            self.memory.end(phase)
        self.progress.end(outer)

    def peek(self) -> dict[str, float]:
        """The metrics of the step so far."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def flush(self) -> dict[str, float]:
        """The metrics of the step; the recorder is empty afterwards."""
        flushed = self.peek() | (self.memory.flush() if self.memory is not None else {})
        self._values.clear()
        self.spans.clear()
        return flushed
