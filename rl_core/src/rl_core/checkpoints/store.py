"""Step folders that are whole or absent: written aside, synced, renamed; knows nothing of what is in them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError

_FOLDER = re.compile(r"^step_(\d{6,})$")
_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: the newest, and the best by a metric."""

    keep_latest_k: int = 2
    keep_top_k: int | None = None
    metric_name: str | None = None
    higher_is_better: bool = True


class CheckpointStore:
    """Checkpoints of one run, `step_000010/` and so on.

    A folder under its final name is complete: it was renamed only after every file was on disk. What a kill left behind
    ends in `.partial` and is swept at the next start.

    Args:
        folder: holds the step folders; made when first written to.
        retention: which of them stay.
    """

    def __init__(self, folder: Path, retention: Retention | None = None) -> None:
        self.folder = folder
        self._retention = retention or Retention()

    def sweep(self) -> None:
        """Delete what an interrupted write left behind."""
        for partial in self.folder.glob("step_*.partial"):
            shutil.rmtree(partial)

    def write(self, step: int, fill: Callable[[Path], None], metrics: Mapping[str, float]) -> Path:
        """Make the checkpoint of `step`, then delete those that retention lets go.

        Args:
            step: steps done.
            fill: writes everything into the folder that it is given.
            metrics: what retention ranks by.
        """
        final = self.path(step)
        partial = final.with_name(final.name + ".partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        fill(partial)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        (partial / _MANIFEST).write_text(json.dumps({"step": step, "metrics": finite}, indent=1), encoding="utf-8")
        _sync_tree(partial)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync(self.folder)
        self._prune()
        return final

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps of which a complete checkpoint is here, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_FOLDER.match(entry.name) for entry in self.folder.iterdir() if (entry / _MANIFEST).is_file())
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self._retention.keep_latest_k :]) | set(self._best(steps))
        for step in steps:
            if step not in kept:
                doomed = self.path(step)
                partial = doomed.with_name(doomed.name + ".partial")
                os.replace(doomed, partial)
                shutil.rmtree(partial)

    def _best(self, steps: list[int]) -> list[int]:
        name, top = self._retention.metric_name, self._retention.keep_top_k
        if name is None or top is None:
            return []
        sign = 1.0 if self._retention.higher_is_better else -1.0
        scores = {step: read_manifest(self.path(step))["metrics"].get(name) for step in steps}
        scored = [step for step in steps if scores[step] is not None]
        return sorted(scored, key=lambda step: (sign * scores[step], step))[-top:]


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """`step` and `metrics` of a checkpoint.

    Raises:
        CheckpointError: the folder is no complete checkpoint.
    """
    path = checkpoint / _MANIFEST
    if not path.is_file():
        steps = sorted(checkpoint.glob("checkpoints/step_*"))
        there = sorted(entry.name for entry in checkpoint.iterdir())[:8] if checkpoint.is_dir() else None
        raise CheckpointError(
            f"{checkpoint} is no checkpoint: it has no {_MANIFEST}"
            + (f" (it holds {', '.join(there) or 'nothing'})." if there is not None else " (there is no such folder).")
            + (
                f" It is a run folder: name {steps[-1]}."
                if steps
                else " Name a folder such as runs/NAME/checkpoints/step_000010."
            )
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
