"""The predicted memory of a run: bytes by process, phase and part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Parts = Mapping[str, int]
"""Bytes by part, such as `weights` or `activations`."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """The predicted memory of a process, or of one GPU.

    Attributes:
        name: What runs in it: `policy`, `engine`, `driver`, or several of them joined by ` + `.
        count: Number of equal ones on one machine.
        phases: The parts that are in memory in each phase of a step; not empty.
    """

    name: str
    count: int
    phases: Mapping[str, Parts]

    def bytes_in(self, phase: str) -> int:
        """Bytes of one process in a phase; in a phase that does not concern it, those of its phase with the fewest."""
        if phase in self.phases:
            return sum(self.phases[phase].values())
        return min(sum(parts.values()) for parts in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes."""
        return max(self.phases, key=self.bytes_in)

    @property
    def peak(self) -> int:
        """Bytes of one process in its peak phase."""
        return self.bytes_in(self.peak_phase)

    @property
    def largest_part(self) -> str:
        """The part with the most bytes in the peak phase."""
        parts = self.phases[self.peak_phase]
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The predicted memory of a run.

    Attributes:
        processes: On GPUs, one entry describes each GPU.
        on_gpu: Whether `limit` is the memory of one GPU; otherwise, of the machine.
        limit: Bytes that are available; None if unknown.
        undescribed: Models, and the engine, whose backends do not describe their memory, one sentence fragment each.
        not_counted: What else the plan leaves out or assumes, in the same form.
    """

    processes: tuple[ProcessPlan, ...]
    on_gpu: bool
    limit: int | None
    undescribed: tuple[str, ...]
    not_counted: tuple[str, ...]

    def bytes_in(self, phase: str) -> int:
        """Bytes of all processes of the machine in a phase; on GPUs, those of one GPU."""
        return sum(process.bytes_in(phase) * (1 if self.on_gpu else process.count) for process in self.processes)

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes in all processes."""
        return max((phase for process in self.processes for phase in process.phases), key=self.bytes_in)

    @property
    def peak(self) -> int:
        """Bytes in the peak phase."""
        return self.bytes_in(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None if there is no limit, or if only a part of the run is described."""
        if self.limit is None or (self.undescribed and self.peak <= self.limit):
            return None
        return self.peak <= self.limit

    @property
    def largest_process(self) -> ProcessPlan:
        """The process that needs the most in the peak phase."""
        return max(self.processes, key=lambda process: process.bytes_in(self.peak_phase) * process.count)
