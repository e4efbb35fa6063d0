"""What a diagnosis comes to: a verdict, what was found, why it matters and what to do; knows nothing that is diagnosed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DiagnosisStatus(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A run works, and something is not as one would think."""
    FAILED = "failed"
    """What a run learns from this would be wrong."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One thing that was looked at."""

    name: str
    """Of the diagnosis, such as `length_limit`."""
    verdict: DiagnosisStatus
    found: str
    """What was seen, with its numbers."""
    why: str = ""
    """Why it matters; empty where it is ok."""
    remedy: str = ""
    """What to do; empty where it is ok."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """All that was found, as plain values for programs."""

    def __str__(self) -> str:
        lines = [f"{self.verdict.value}: {self.name}: {self.found}"]
        lines += [line for line in (self.why, self.remedy) if line]
        return "\n  ".join(lines)
