"""A curve as text, for a terminal or a log."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore_cli.report.run_folder import read_lines
from rlcore_cli.report.scales import nice_ticks, thin

WIDTH = 72
HEIGHT = 14


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps at which it was recorded."""

    steps: Sequence[int]
    values: Sequence[float]


def read_series(path: Path, name: str) -> Series:
    """The values of a metric in a metrics.jsonl; steps without it, and a last line that a kill cut short, are left out.

    Raises:
        DataError: a line is damaged.
    """
    kept = [row for row in read_lines(path) if row.get(name) is not None]
    return Series(steps=[row["step"] for row in kept], values=[row[name] for row in kept])


def draw(curves: Sequence[tuple[str, Series]], title: str) -> str:
    """Curves over each other, without colours, `WIDTH` columns wide or as wide as the terminal, if that is less.

    Args:
        curves: the marker of each, a letter or a name that plotext knows such as `braille`, and its values.
        title: what they show.
    """
    import plotext

    steps = [step for _, series in curves for step in series.steps]
    plotext.clear_figure()
    plotext.plot_size(min(WIDTH, shutil.get_terminal_size().columns), HEIGHT)
    plotext.theme("clear")
    for marker, series in curves:
        plotext.plot(*thin(series.steps, series.values, WIDTH), marker=marker)
    if min(steps) < max(steps):
        ticks = nice_ticks(min(steps), max(steps), count=6, whole=True)
        plotext.xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    plotext.title(title)
    plotext.xlabel("step")
    lines = plotext.uncolorize(plotext.build()).rstrip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)
