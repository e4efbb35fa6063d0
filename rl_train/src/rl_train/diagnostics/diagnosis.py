"""The result of a diagnosis: its status, what was found, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DiagnosisStatus(StrEnum):
    """Severity of a result."""

    OK = "ok"
    NOTE = "note"
    """Neither good nor bad."""
    WARNING = "warning"
    """Runs work, but something is unusual."""
    FAILED = "failed"
    """Runs would learn from wrong numbers."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of one diagnosis."""

    name: str
    """Name of the diagnosis, such as `length_limit`."""
    status: DiagnosisStatus
    found: str
    """What was measured, with numbers."""
    why: str = ""
    """Why it matters; always empty if the status is ok."""
    remedy: str = ""
    """What to do; always empty if the status is ok."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """All measurements as plain values, for programs."""

    def __post_init__(self) -> None:
        if self.status is DiagnosisStatus.OK:
            object.__setattr__(self, "why", "")
            object.__setattr__(self, "remedy", "")

    def __str__(self) -> str:
        lines = [f"{self.status.value}: {self.name}: {self.found}"]
        lines += [line for line in (self.why, self.remedy) if line]
        return "\n  ".join(lines)
