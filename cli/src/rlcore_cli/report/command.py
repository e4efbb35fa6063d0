"""`rlcore report`: writes the HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_train.run_folders.run_names import completed_runs, existing_run_path
from rl_train.sizes import format_size
from rlcore_cli.report.ending import ending_of
from rlcore_cli.report.run_folder import read_run_folder

PAGE = "report.html"


def report(
    run_folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, or its name in runs.", show_default=False, autocompletion=completed_runs
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Output file; report.html in the run folder by default.")] = None,
    max_mib: Annotated[
        float, typer.Option(min=0.5, help="Maximum size of the report in MiB; rollouts are omitted to stay below it.")
    ] = 5.0,
) -> None:
    """Write an HTML report of a run: curves, rollouts by token, config, versions, outcome.

    The report is a single file that needs no network. The run may still be in progress; `rlcore watch` shows a page that is
    updated.

    Example:
        rlcore report grpo_addition
        rlcore report runs/grpo_addition --output /tmp/run.html
    """
    from rlcore_cli.report.page import render, write_page

    run_folder = existing_run_path(run_folder)
    page = output if output is not None else run_folder / PAGE
    run = read_run_folder(run_folder)
    ending = ending_of(run)
    write_page(page, render(run, ending, max_mib=max_mib))
    print(f"{page} ({format_size(page.stat().st_size)}). {ending.sentence}", flush=True)
