"""Renders a comparison as an HTML page, in the style of the report."""

from __future__ import annotations

from typing import Any

from rlcore_cli.compare.comparison import Comparison, MetricComparison
from rlcore_cli.compare.terminal import better_runs, cell
from rlcore_cli.report.page import Figure, figure, render_template
from rlcore_cli.report.panels import SelectedPanel, choose_panels


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
