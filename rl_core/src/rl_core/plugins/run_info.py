"""What event hooks see of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class RunInfo(Protocol):
    """Read-only view of a run, passed to the event hooks.

    Attributes:
        config: The whole config, a frozen pydantic model.
        folder: The run folder: config, metrics, rollouts and checkpoints.
        first_step: Number of steps done before this run was resumed; 0 for a new run.
    """

    @property
    def config(self) -> Any: ...

    @property
    def folder(self) -> Path: ...

    @property
    def first_step(self) -> int: ...
