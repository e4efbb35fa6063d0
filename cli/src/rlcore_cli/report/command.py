"""`rlcore report`: writes the HTML report of a run, once or repeatedly until the run ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rl_train.metrics.jsonl import METRICS
from rlcore_cli.report.ending import Ending, ending_of
from rlcore_cli.report.run_folder import STATUS, read_run_folder

PAGE = "report.html"
Stamp = tuple[float, ...]
"""Modification times of the files that change with every step."""


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The run folder.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Output file; report.html in the run folder by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Update the report until the run ends.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="With --follow: interval between checks for new data, in seconds.")
    ] = 5.0,
    max_mib: Annotated[
        float, typer.Option(min=0.5, help="Maximum size of the report in MiB; rollouts are omitted to stay below it.")
    ] = 5.0,
) -> None:
    """Write an HTML report of a run: curves, rollouts by token, config, versions, outcome.

    The report is a single file that needs no network. The run may still be in progress.

    Example:
        rlcore report runs/grpo_addition
        rlcore report runs/grpo_addition --follow --output /tmp/run.html
    """
    page = output if output is not None else run_folder / PAGE
    seen = _stamp(run_folder)  # taken before reading, so that changes during the read are noticed
    ending = _write(run_folder, page, max_mib=max_mib, live=follow)
    print(f"{page} ({page.stat().st_size / 2**20:.2f} MiB). {ending.sentence}", flush=True)
    if follow and not ending.is_over:
        ending = _follow(run_folder, page, seen=seen, max_mib=max_mib, every=every)
        print(f"{page} is complete. {ending.sentence}")


def _follow(run_folder: Path, page: Path, *, seen: Stamp, max_mib: float, every: float) -> Ending:

    while True:
        time.sleep(every)
        now = _stamp(run_folder)
        # A killed process changes no file, so the status of an unchanged folder is checked as well, without reading rollouts.
        ending = _write(run_folder, page, max_mib=max_mib, live=True) if now != seen else ending_of(read_run_folder(run_folder))
        if ending.is_over:
            return _write(run_folder, page, max_mib=max_mib, live=False)
        seen = now


def _write(run_folder: Path, page: Path, *, max_mib: float, live: bool) -> Ending:
    from rlcore_cli.report.page import render, write_page

    run = read_run_folder(run_folder)
    ending = ending_of(run)
    write_page(page, render(run, ending, max_mib=max_mib, live=live))
    return ending


def _stamp(run_folder: Path) -> Stamp:

    watched = (run_folder / METRICS, run_folder / STATUS)
    return tuple(path.stat().st_mtime_ns if path.exists() else 0.0 for path in watched)
