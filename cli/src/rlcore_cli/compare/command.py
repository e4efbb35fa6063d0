"""`rlcore compare`: reads run folders and shows how the runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_core.errors import UserError
from rl_train.run_folders.run_names import completed_runs, existing_run_path
from rl_train.sizes import format_size
from rlcore_cli.arguments import AsJson
from rlcore_cli.compare.comparison import Comparison, MetricComparison, compare_runs
from rlcore_cli.compare.terminal import better_runs, cell, lines
from rlcore_cli.report.page import Figure, figure, render_template, write_page
from rlcore_cli.report.panels import SelectedPanel, choose_panels
from rlcore_cli.report.run_folder import read_run_folder


def compare(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Two or more run folders, or their names in runs.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all metrics that the runs have in common.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: overlaid curves, differences between configs, final and best value of each metric.

    Example:
        rlcore compare grpo_addition grpo_addition-2
        rlcore compare runs/a runs/b runs/c --output compare.html
    """
    if len(run_folders) < 2:
        raise UserError(
            f"Only one run given ({run_folders[0]}): `rlcore compare` needs at least two. `rlcore report` shows one run."
        )
    comparison = compare_runs([read_run_folder(existing_run_path(folder)) for folder in run_folders])
    if output is not None:
        write_page(output, render_comparison(comparison))
    if as_json:
        print(json.dumps(_plain(comparison), indent=2))
        return
    print("\n".join(lines(comparison, everything=everything)))
    if output is not None:
        print(f"\n{output} ({format_size(output.stat().st_size)})")


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": {name: str(run.path) for name, run in zip(comparison.letters, comparison.runs, strict=True)},
        "config": {key: list(values) for key, values in comparison.settings},
        "versions": {key: list(values) for key, values in comparison.versions},
        "metrics": {
            row.metric: {
                "better": row.direction,
                "compared_at": row.step,
                "final": [{"value": value, "step": step} for value, step in row.finals],
                "best": None if row.bests is None else [{"value": value, "step": step} for value, step in row.bests],
            }
            for row in comparison.metrics
        },
    }


def render_comparison(comparison: Comparison) -> str:
    """The HTML page."""
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.names()))
    main, further, unseen = choose_panels(names)
    return render_template(
        "compare.html.jinja",
        comparison=comparison,
        runs=list(zip(comparison.letters, comparison.runs, strict=True)),
        figures=[drawn for chosen in main for drawn in _figures(comparison, chosen)],
        further=[drawn for chosen in further for drawn in _figures(comparison, chosen)],
        unseen=unseen,
        metrics=[_row(found, comparison) for found in comparison.metrics],
    )


def _figures(comparison: Comparison, chosen: SelectedPanel) -> list[Figure]:
    """One chart per metric, one line per run."""
    panel = chosen.panel
    return [
        figure(
            [(letter, run.curve(name)) for letter, run in zip(comparison.letters, comparison.runs, strict=True)],
            title=name,
            unit=panel.unit,
            note=panel.note if len(chosen.names) == 1 else "",
        )
        for name in chosen.names
    ]


def _row(row: MetricComparison, comparison: Comparison) -> dict[str, Any]:
    def cells(points: tuple[tuple[float, int], ...]) -> list[tuple[str, int]]:
        return [(cell(value, points[0][0] if index else None), step) for index, (value, step) in enumerate(points)]

    return {
        "metric": row.metric,
        "direction": row.direction,
        "steps_differ": row.step is None,
        "finals": cells(row.finals),
        "bests": cells(row.bests) if row.bests is not None else [("", None)] * len(comparison.runs),
        "words": better_runs(row, comparison.letters),
    }
