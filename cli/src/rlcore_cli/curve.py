"""Plots curves as text, for a terminal or a log."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from rlcore_cli.report.chart import nice_ticks, thin
from rlcore_cli.report.run_folder import Curve

WIDTH = 72
HEIGHT = 14


def draw(curves: Sequence[tuple[str, Curve]], title: str) -> str:
    """Overlaid curves without colors, at most as wide as `WIDTH` and the terminal; one line if all values are equal.

    Args:
        curves: marker (a letter or a plotext marker such as `braille`) and values of each curve.
        title: title of the plot.
    """
    import plotext

    steps = [step for _, series in curves for step in series.steps]
    values = [value for _, series in curves for value in series.values]
    if min(values) == max(values):
        return f"{title}: {values[0]:.3f} from step {min(steps)} to {max(steps)}"
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
