"""Draws a metric of one run or several as a small SVG for the documents.

    python docs/make_curves.py docs/curves/grpo-reward.svg reward/mean runs/grpo_addition

Of several runs, each given as `label=folder`, all are drawn over each other. The page that shows a curve says by which command
its run was made.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from rlcore_cli.report.chart import HEIGHT, WIDTH, Line, line_chart
from rlcore_cli.report.run_folder import read_run_folder

HEADING, LEGEND, MARGIN = 24, 20, 8
"""Pixels over, under and right of the drawing; the last number of an axis reaches beyond it."""
COLOURS = ("#2a6fdb", "#c2571a", "#2e8540", "#8a4fbf", "#b02a5b", "#0f7f8c", "#8a6d00", "#5a6372")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444 }
.heading { font-weight: 600 } .left { text-anchor: end } .below { text-anchor: middle }
.grid { stroke: #8883; fill: none } .axis, .tick { stroke: #888; fill: none } .cursor { display: none }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round } .thin { stroke-width: 1; opacity: .35 }
@media (prefers-color-scheme: dark) { text { fill: #bbb } }
"""


def curve(metric: str, runs: Mapping[str, Path], by: str = "step") -> str:
    """The metric over the steps of the runs, by their labels, as an SVG that stands alone; `by` names the horizontal axis.

    Raises:
        SystemExit: A run has no value of the metric.
    """
    lines = []
    for colour, (label, run) in enumerate(runs.items()):
        series = read_run_folder(run).curve(metric)
        if not series.steps:
            raise SystemExit(f"{run}/metrics.jsonl has no {metric!r}")
        lines.append(Line(label=label, steps=series.steps, values=series.values, colour=colour))
    chart = re.sub(r' (data-readings|aria-label|role|viewBox)="[^"]*"', "", line_chart(lines, title=metric))
    width, height = WIDTH + MARGIN, HEADING + HEIGHT + (LEGEND if len(lines) > 1 else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(metric)} by {escape(by)}</title><style>{STYLE}{_colours(len(lines))}</style>"
        f'<text class="heading" x="8" y="16">{escape(metric)}</text>'
        f'<text x="{WIDTH - 12}" y="16" class="left">by {escape(by)}</text>'
        f'<g transform="translate(0 {HEADING})">{chart.replace("<svg", "<g").replace("</svg>", "</g>")}</g>'
        f"{_legend(lines, height - 6)}</svg>\n"
    )


def _colours(count: int) -> str:
    rules = (f"polyline.c{i} {{ stroke: {COLOURS[i]} }} circle.c{i}, text.c{i} {{ fill: {COLOURS[i]} }}" for i in range(count))
    return "\n".join(rules)


def _legend(lines: list[Line], y: int) -> str:
    if len(lines) == 1:
        return ""
    width = (WIDTH - 16) / len(lines)
    names = (
        f'<text class="c{line.colour}" x="{8 + i * width:.0f}" y="{y}">{escape(line.label)}</text>'
        for i, line in enumerate(lines)
    )
    return "".join(names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("metric")
    parser.add_argument("runs", nargs="+", metavar="[label=]run_folder")
    parser.add_argument("--by", default="step", help="what the runs give as steps, such as seconds")
    given = parser.parse_args()
    labelled = (run.rpartition("=") for run in given.runs)
    drawing = curve(given.metric, {label or folder: Path(folder) for label, _, folder in labelled}, given.by)
    given.output.write_text(drawing, encoding="utf-8")
