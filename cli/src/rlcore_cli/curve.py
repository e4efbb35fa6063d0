"""A curve as text, for a terminal or a log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlcore_cli.report.run_folder import read_lines

WIDTH = 72
HEIGHT = 14


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps at which it was recorded."""

    steps: list[int]
    values: list[float]


def read_series(path: Path, name: str) -> Series:
    """The values of a metric in a metrics.jsonl; steps without it, and a last line that a kill cut short, are left out.

    Raises:
        DataError: a line is damaged.
    """
    kept = [row for row in read_lines(path) if row.get(name) is not None]
    return Series(steps=[row["step"] for row in kept], values=[row[name] for row in kept])


def draw(series: Series, title: str) -> str:
    """The curve, `WIDTH` columns wide, without colours."""
    import plotext

    plotext.clear_figure()
    plotext.plot_size(WIDTH, HEIGHT)
    plotext.theme("clear")
    plotext.plot(series.steps, series.values, marker="braille")
    plotext.title(title)
    plotext.xlabel("step")
    drawing: str = plotext.uncolorize(plotext.build())
    return drawing
