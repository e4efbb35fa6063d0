"""`rlcore runs`: lists the runs in a folder with status, steps, best metric and disk use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_core.errors import DataError, UserError
from rl_train.files import format_size
from rl_train.run_folders.run_names import RUNS, runs_in
from rlcore_cli.arguments import AsJson
from rlcore_cli.listing import print_table
from rlcore_cli.report.page import ending_of
from rlcore_cli.report.run_folder import RunFolder, read_run_folder

_METRICS = (("validation/accuracy", True), ("validation/loss", False), ("reward/mean", True))
"""Metrics shown if the config ranks checkpoints by none, the first that was recorded; whether higher is better."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run; values are None if they are not recorded.

    Attributes:
        folder: The run folder.
        status: As in `Ending.state`, or `unreadable`.
        step: The last recorded step.
        planned_steps: The number of steps in the config.
        metric: The metric of `best`.
        best: The best value of that metric.
        best_step: The first step with it.
        bytes_on_disk: Size of all files in the folder.
        problem: Why the folder cannot be read.
    """

    folder: str
    status: str
    step: int | None = None
    planned_steps: int | None = None
    metric: str | None = None
    best: float | None = None
    best_step: int | None = None
    bytes_on_disk: int
    problem: str | None = None


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that contains run folders.")] = RUNS,
    status: Annotated[
        str | None,
        typer.Option(help="Only runs with this status, such as running, finished or failed.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: status, steps, best metric and disk use.

    The best metric is the one that ranks checkpoints (`checkpointing.metric_name`); otherwise the first that was
    recorded of validation accuracy, validation loss and mean reward.

    Example:
        rlcore runs
        rlcore runs experiments --status failed
        rlcore runs --json
    """
    if not folder.is_dir():
        where = "There is no folder runs here. " if folder == RUNS else f"{folder} is not a folder. "
        raise UserError(f"{where}`rlcore train CONFIG` writes runs to `logger.log_dir`: give that folder.")
    listed = [_listed(path) for path in runs_in(folder)]
    listed = [run for run in listed if status in (None, run.status)]
    if as_json:
        print(json.dumps([asdict(run) for run in listed], indent=2))
        return
    if not listed:
        print(f"no runs in {folder}" + ("" if status is None else f" with status {status}"))
        return
    print_table([["run", "status", "steps", "best", "disk"], *(_cells(run) for run in listed)])
    for run in listed:
        if run.problem is not None:
            print(f"{run.folder}: {run.problem}")


def _listed(path: Path) -> ListedRun:
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    try:
        run = read_run_folder(path)
    except DataError as error:  # one corrupt folder must not hide the others
        return ListedRun(folder=str(path), status="unreadable", bytes_on_disk=size, problem=str(error))
    return ListedRun(
        folder=str(path),
        status=ending_of(run).state,
        step=run.last_step,
        planned_steps=run.planned_steps,
        bytes_on_disk=size,
        **_best(run),
    )


def _best(run: RunFolder) -> Mapping[str, Any]:
    section = (run.config or {}).get("checkpointing") or {}
    ranking = [(section["metric_name"], section.get("higher_is_better", True))] if section.get("metric_name") else []
    for metric, is_higher_better in (*ranking, *_METRICS):
        curve = run.curve(metric)
        if curve.values:
            best = (max if is_higher_better else min)(curve.values)
            return {"metric": metric, "best": best, "best_step": curve.steps[curve.values.index(best)]}
    return {}


def _cells(run: ListedRun) -> list[str]:
    steps = "-" if run.step is None else str(run.step)
    steps += "" if run.planned_steps is None else f"/{run.planned_steps}"
    best = "-" if run.best is None else f"{run.metric} {run.best:.4g} at step {run.best_step}"
    return [Path(run.folder).name, run.status, steps, best, format_size(run.bytes_on_disk)]
