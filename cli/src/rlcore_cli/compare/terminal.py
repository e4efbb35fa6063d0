"""Renders a comparison for a terminal: overlaid curves, differences, a table of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcore_cli.compare.comparison import Comparison, MetricComparison
from rlcore_cli.curve import draw
from rlcore_cli.listing import aligned
from rlcore_cli.report.panels import choose_panels
from rlcore_cli.report.scales import format_number

DRAWN = ("reward/mean", "validation/accuracy", "validation/loss", "loss")
"""Metrics to plot: the first two of these that all runs have."""
MOST_DRAWN = 2
LONGEST_VALUE = 40
MOST_NAMED = 12


def lines(comparison: Comparison, *, everything: bool) -> Iterator[str]:
    """The lines of the comparison.

    Args:
        comparison: The runs.
        everything: Include all shared metrics, not only those that a report shows first.
    """
    for name, run in zip(comparison.letters, comparison.runs, strict=True):
        yield f"{name} = {run.path} ({run.last_step or 0} steps)"
    shared = [row.metric for row in comparison.metrics]
    for metric in [name for name in DRAWN if name in shared][:MOST_DRAWN]:
        yield ""
        runs = zip(comparison.letters, comparison.runs, strict=True)
        yield draw([(name[0], run.curve(metric)) for name, run in runs], metric)
    yield ""
    yield from _differing("config", comparison, comparison.settings)
    if comparison.without_environment:
        yield f"Versions not compared: no environment.json in {', '.join(comparison.without_environment)}."
        yield ""
    else:
        yield from _differing("version", comparison, comparison.versions)
    chosen, _, _ = choose_panels([row.metric for row in comparison.metrics])
    first_shown = {name for panel in chosen for name in panel.names}
    metrics = [row for row in comparison.metrics if everything or row.metric in first_shown]
    for note in comparison.notes(metrics):
        yield note
        yield ""
    yield from _metric_table(metrics, comparison.letters)
    if comparison.not_shared:
        named, more = comparison.not_shared[:MOST_NAMED], len(comparison.not_shared) - MOST_NAMED
        yield f"Not in all runs: {', '.join(named)}" + (f", and {more} more." if more > 0 else ".")


def cell(value: float, first: float | None) -> str:
    """A value and its difference from the first run."""
    if first is None:
        return format_number(value)
    if value == first:
        return f"{format_number(value)} (=)"
    sign = "+" if value > first else ""
    return f"{format_number(value)} ({sign}{format_number(value - first)})"


def better_runs(row: MetricComparison, letters: tuple[str, ...]) -> str:
    """The labels of the better runs, or '' if the metric has no direction."""

    def name(winners: tuple[int, ...]) -> str:
        return "equal" if len(winners) == len(letters) else " and ".join(letters[index] for index in winners)

    end, best = name(row.best_final), name(row.best_overall)
    if row.step is None:
        return f"best: {best}" if best else ""
    return end if end == best else f"final: {end}, best: {best}"


def _differing(title: str, comparison: Comparison, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> Iterator[str]:
    if not rows:
        yield f"No differences between the {title}s."
        yield ""
        return
    table = [[title, *comparison.letters]]
    table += [[key, *(_short(value) for value in values)] for key, values in rows]
    yield from aligned(table)
    yield ""


def _metric_table(metrics: Sequence[MetricComparison], letters: tuple[str, ...]) -> Iterator[str]:
    if not metrics:
        yield "The runs have no metric in common."
        return
    table = [["metric", *(f"{name} final" for name in letters), *(f"{name} best" for name in letters), "better run"]]
    for row in metrics:
        bests = row.bests or ()
        table.append(
            [
                row.metric,
                *_cells(row.finals, with_steps=row.step is None),
                *(_cells(bests) or [""] * len(letters)),
                better_runs(row, letters),
            ]
        )
    yield from aligned(table)
    yield "In parentheses: difference from A. With one run each, a difference may be due to the seed."


def _cells(points: tuple[tuple[float, int], ...], *, with_steps: bool = False) -> list[str]:
    values = [cell(value, points[0][0] if index else None) for index, (value, _) in enumerate(points)]
    return [f"{value} at {step}" for value, (_, step) in zip(values, points, strict=True)] if with_steps else values


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"
