"""When the phases of one step ran, and what its rollouts waited for meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step; all times are in seconds from its start."""

    seconds: float
    """Duration of the step."""
    phases: Sequence[tuple[str, float, float]]
    """Name, start and end of each phase of the step loop, in the order of their ends."""
    waiting: Mapping[str, Sequence[float]]
    """By `engine` and `environment`: the mean number of rollouts that waited for it, in equal parts of the step."""
