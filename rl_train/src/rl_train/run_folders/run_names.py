"""Finds run folders by name. Imports no YAML, so that shells can complete names quickly."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
"""The default of `logger.log_dir`, whose run folders can be given by name."""
_STARTED = "config.yaml"
"""Written when a run starts or is resumed, and not after that."""
_FILES = ("metrics.jsonl", "status.json")


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return any((path / name).is_file() for name in _FILES)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder, by name; none if it does not exist."""
    return sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []


def newest_run(folder: Path) -> Path | None:
    """The run folder of the process that started last; None if there is none."""
    return max(runs_in(folder), key=_started, default=None)


def _started(run: Path) -> float:
    path = run / _STARTED
    return path.stat().st_mtime if path.is_file() else 0.0
