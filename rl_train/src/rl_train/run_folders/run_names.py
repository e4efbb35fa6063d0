"""Finds run folders by name. Light to import, so that shells can complete names quickly."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean

RUNS = Path("runs")
"""The default of `logger.log_dir`, whose run folders can be given by name."""
_STARTED = "config.yaml"
"""Written when a run starts or is resumed, and not after that."""
_FILES = ("metrics.jsonl", "status.json")
_OTHERS = ("manifest.json", "config.json")
"""Files of step folders and model folders."""


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return any((path / name).is_file() for name in _FILES)


def runs_in(folder: Path) -> list[Path]:
    """The run folders in a folder, by name; none if it does not exist."""
    return sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []


def newest_run(folder: Path) -> Path | None:
    """The run folder of the process that started last; None if there is none."""
    return max(runs_in(folder), key=_started, default=None)


def run_path(given: Path | str) -> Path:
    """The path of what a user names: a run in `RUNS` by its name, or any path, which need not exist.

    A folder that is neither a run, a checkpoint nor a model does not count: `rlcore init` writes one with the name of its run.

    Raises:
        UserError: There are a run and another run, checkpoint, model or file of this name.
    """
    path = Path(given)
    run = RUNS / path
    if len(path.parts) != 1 or not is_run(run):
        return path
    is_other = path.is_file() or is_run(path) or any((path / name).is_file() for name in _OTHERS)
    if is_other and not path.samefile(run):
        raise UserError(f"{path} is ambiguous: it is a path, and {run} is a run. Give {path.absolute()} or {run}.")
    return run


def text_of_run(given: str) -> str:
    """As `run_path`, for a text that may also be the name of a model: what is not a run stays as it is written."""
    run = run_path(given) if Path(given).name == given else Path(given)
    return given if run == Path(given) else str(run)


def existing_run_path(given: Path | str) -> Path:
    """As `run_path`, for commands that read only what exists.

    Raises:
        UserError: No path has this name; suggests runs.
    """
    path = run_path(given)
    if not path.exists():
        raise UserError(f"{path} does not exist. Give a run folder, such as {RUNS}/NAME, or its name.{similar_runs(path)}")
    return path


def similar_runs(given: Path | str) -> str:
    """' Did you mean 'x'?' for a run with a similar name, else the first runs; '' without runs."""
    names = completed_runs("")
    runs = f" Runs in {RUNS}: {', '.join(names[:8])}." if names else ""
    return did_you_mean(Path(given).name, names) or runs


def completed_runs(incomplete: str) -> list[str]:
    """The names of the runs that begin with what was typed, for shells."""
    return [path.name for path in runs_in(RUNS) if path.name.startswith(incomplete)]


def _started(run: Path) -> float:
    path = run / _STARTED
    return path.stat().st_mtime if path.is_file() else 0.0
