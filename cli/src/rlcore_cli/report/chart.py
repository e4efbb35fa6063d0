"""Draws charts as inline SVG, colored by the style sheet of the page, with their ticks, number formats and averages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate

from rlcore_cli.report.run_folder import Curve

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 26
COLOURS = 8
"""Number of series colors in the style sheet: `c0` to `c7`."""
BAND = 14
"""Height of the bands of a time line, in pixels."""
_HALF_DIGIT = 3.7
"""Half the width of a digit of the widest font in the style sheet, in pixels."""
DOTS_UP_TO = 30
SMOOTHED_FROM = 60
MOST_BARS = 60


@dataclass(frozen=True, kw_only=True)
class Line(Curve):
    """One curve of a chart. Steps with NaN or infinite values are marked at the top of the chart.

    Attributes:
        label: Its name in the legend.
        colour: Index of the color, modulo `COLOURS`.
    """

    label: str
    colour: int

    @property
    def is_smoothed(self) -> bool:
        """Whether a moving average is drawn over the curve: it must be long enough and not constant."""
        return len(self.steps) >= SMOOTHED_FROM and min(self.drawn[1]) < max(self.drawn[1])

    @cached_property
    def drawn(self) -> tuple[list[int], list[float]]:
        """Steps and values of at most `MOST_POINTS` points, with the extreme ones."""
        return thin(self.steps, self.values)

    @property
    def window(self) -> int:
        """Window of the moving average, in values."""
        return max(3, len(self.steps) // 20)


@dataclass(frozen=True, kw_only=True)
class Band:
    """A colored stretch of a time line, in seconds."""

    label: str
    start: float
    end: float
    colour: int


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Maps steps and values to pixels."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        """Horizontal position of a step in the chart, in pixels from the left."""
        first, last = self.steps
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical position of a value in the chart, in pixels from the top."""
        low, high = self.values
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line_chart(lines: Sequence[Line], *, title: str) -> str:
    """Draws curves over steps; returns "" if no curve has a value.

    A long curve is drawn thin, with its moving average over it.

    Args:
        lines: The curves.
        title: Text for screen readers.
    """
    drawn = [line for line in lines if len(line.steps) > 0]
    bad = sorted({step for line in lines for step in line.not_finite})
    if not drawn:
        return ""
    ends = [step for line in drawn for step in (line.steps[0], line.steps[-1])] + bad
    values = [value for line in drawn for value in line.drawn[1]]
    axes = Axes(steps=_step_range(min(ends), max(ends)), values=padded_range(values))
    body = [_frame(axes), *(_line(line, axes) for line in drawn)]
    body += [f'<path class="bad" d="M{axes.x(step):.1f} {TOP}v8"/>' for step in thin(bad, bad)[0]]
    return _svg(title, body, _readings(drawn, axes))


def stacked_chart(steps: Sequence[int], layers: Sequence[tuple[str, Sequence[float], int]], *, title: str) -> str:
    """Draws stacked bars; with many steps, each bar is the mean of several. Returns "" if there are no steps.

    Args:
        steps: [N], ascending.
        layers: Label, [N] non-negative values and color of each layer, bottom layer first.
        title: Text for screen readers.
    """
    if not steps:
        return ""
    bars = _stretches(len(steps))
    means = [[sum(values[i] for i in bar) / len(bar) for bar in bars] for _, values, _ in layers]
    tops = [sum(column) for column in zip(*means, strict=True)]
    axes = Axes(steps=(steps[0] - 0.5, steps[-1] + 0.5), values=(0.0, max(tops) * 1.05 or 1.0))
    body = [_frame(axes)]
    below = [0.0] * len(bars)
    for (_, _, colour), heights in zip(layers, means, strict=True):
        for index, (bar, height) in enumerate(zip(bars, heights, strict=True)):
            left, right = axes.x(steps[bar[0]] - 0.5), axes.x(steps[bar[-1]] + 0.5)
            top, bottom = axes.y(below[index] + height), axes.y(below[index])
            if bottom - top > 0.05:
                gap = min(1.0, (right - left) * 0.12)
                width = right - left - gap
                body.append(
                    f'<rect class="c{colour % COLOURS}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{bottom - top:.1f}"/>'
                )
            below[index] += height
    centres = [steps[bar[len(bar) // 2]] for bar in bars]
    lines = [
        Line(label=label, steps=centres, values=heights, colour=colour)
        for (label, _, colour), heights in zip(layers, means, strict=True)
    ]
    return _svg(title, body, _readings(lines, axes))


def time_chart(seconds: float, bands: Sequence[Band], curves: Sequence[tuple[str, Sequence[float], int]], *, title: str) -> str:
    """Draws a row of bands, and curves below it, over time.

    Args:
        seconds: Length of the time axis.
        bands: Colored stretches.
        curves: Label, means in equal parts of the time, and color of each curve.
        title: Text for screen readers.
    """
    largest = max((value for _, values, _ in curves for value in values), default=0.0)
    axes = Axes(steps=(0.0, seconds), values=(0.0, largest * 1.25 or 1.0))
    body = [_frame(axes, whole=False)]
    for band in bands:
        left, right = axes.x(band.start), axes.x(min(band.end, seconds))
        width = max(right - left, 0.5)
        body.append(f'<rect class="c{band.colour % COLOURS}" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{BAND}"/>')
    series = []
    for label, values, colour in curves:
        centres = [round((index + 0.5) * seconds / len(values), 3) for index in range(len(values))]
        body.append(f'<polyline class="c{colour % COLOURS}" points="{_points(centres, values, axes)}"/>')
        series.append([label, colour % COLOURS, centres, [format_number(value) for value in values]])
    return _svg(title, body, _encoded(series, axes, of="second"))


def _line(line: Line, axes: Axes) -> str:
    colour = f"c{line.colour % COLOURS}"
    steps, values = line.drawn
    raw = f'<polyline class="{colour}{" thin" if line.is_smoothed else ""}" points="{_points(steps, values, axes)}"/>'
    if line.is_smoothed:
        count = len(line.steps)
        at = [index * (count - 1) // (MOST_POINTS - 1) for index in range(MOST_POINTS)] if count > MOST_POINTS else range(count)
        smooth = moving_mean(line.values, line.window, at)
        return raw + f'<polyline class="{colour}" points="{_points([line.steps[index] for index in at], smooth, axes)}"/>'
    if len(line.steps) <= DOTS_UP_TO:
        dots = (
            f'<circle class="{colour}" cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="2.4"/>'
            for step, value in zip(steps, values, strict=True)
        )
        return raw + "".join(dots)
    return raw


def _points(steps: Sequence[float], values: Sequence[float], axes: Axes) -> str:
    return " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in zip(steps, values, strict=True))


def _frame(axes: Axes, *, whole: bool = True) -> str:
    """Grid, ticks and tick labels; `whole` for ticks at whole numbers only."""
    parts = []
    for tick in nice_ticks(*axes.values):
        y = axes.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="left">{format_number(tick)}</text>')
    # A single step is centered in the chart. There is no step below 0.
    for tick in (tick for tick in nice_ticks(*axes.steps, count=6, whole=whole) if tick >= 0):
        x, label = axes.x(tick), f"{tick:.0f}" if whole else format_number(tick)
        parts.append(f'<path class="tick" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
        middle = min(x, WIDTH - _HALF_DIGIT * len(label))  # a long label under the right end stays in the drawing
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" class="below">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _svg(title: str, body: Sequence[str], readings: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" data-readings="{escape(readings)}">'
        f'{"".join(body)}<path class="cursor" d="M0 {TOP}V{HEIGHT - BOTTOM}"/></svg>'
    )


def _readings(lines: Sequence[Line], axes: Axes) -> str:
    series = []
    for line in lines:
        steps, values = line.drawn
        series.append([line.label, line.colour % COLOURS, steps, [format_number(value) for value in values]])
    return _encoded(series, axes, of="step")


def _encoded(series: Sequence[Sequence[object]], axes: Axes, *, of: str) -> str:
    """The data for the pointer as JSON: the scale of the x axis, what it counts, and label, color and points of each curve."""
    return json.dumps({"x": [axes.x(0), axes.x(1) - axes.x(0)], "series": series, "of": of}, separators=(",", ":"))


def _step_range(first: float, last: float) -> tuple[float, float]:
    return (first, last) if last > first else (first - 1, last + 1)


def _stretches(count: int) -> list[range]:
    bars = min(count, MOST_BARS)
    return [range(index * count // bars, (index + 1) * count // bars) for index in range(bars)]


MOST_POINTS = 400
"""Maximum points per line; more are not visible at the width of a chart."""
_DISTINCT = 1e-3
"""Below this range, as a fraction of the largest value, the numbers of four digits on an axis could be equal."""


def format_number(value: float) -> str:
    """At most four significant digits, with an exponent for very large or small numbers."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def format_duration(seconds: float) -> str:
    """At most two units: 3 h 20 min, 4 min 5 s, 6 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def nice_ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers within [low, high], about `count` of them.

    Args:
        low: Lower end.
        high: Upper end, above `low`.
        count: Approximate number of ticks.
        whole: Only integers.
    """
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * 0.99)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [_clean(index * step, step) for index in range(first, last + 1)]


def padded_range(values: Sequence[float]) -> tuple[float, float]:
    """A non-empty axis range with a small margin; it starts at 0 if the values come close to it."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if size == 0:
        return 0.0, 1.0
    if low == high == 1.0:  # often a share, which has no values above
        return 0.0, 1.05
    if high - low < _DISTINCT * size:
        return low - size * 0.1, high + size * 0.1
    if 0 <= low <= 0.4 * high:
        return 0.0, high * 1.05
    if 0.4 * low <= high <= 0:
        return low * 1.05, 0.0
    margin = (high - low) * 0.06
    return low - margin, high + margin


def thin(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points of a curve: the minimum and maximum of each interval, so that spikes stay visible."""
    if len(steps) <= most:
        return list(steps), list(values)
    stretches = most // 2
    kept: list[int] = []
    for stretch in range(stretches):
        first, last = stretch * len(steps) // stretches, (stretch + 1) * len(steps) // stretches
        interval = values[first:last]
        kept.extend(sorted({first + interval.index(min(interval)), first + interval.index(max(interval))}))
    return [steps[index] for index in kept], [values[index] for index in kept]


def moving_mean(values: Sequence[float], window: int, at: Sequence[int] | None = None) -> list[float]:
    """The centered moving average over `window` values; the window is shorter at the ends.

    Args:
        values: The values.
        window: Their number per mean.
        at: Indexes of the wanted means; all by default.
    """
    sums = [0.0, *accumulate(values)]
    reach = window // 2
    spans = ((max(0, index - reach), min(len(values), index + reach + 1)) for index in at or range(len(values)))
    return [(sums[last] - sums[first]) / (last - first) for first, last in spans]


def _clean(value: float, step: float) -> float:
    """The value without rounding errors such as 0.30000000000000004."""
    digits = max(0, 2 - math.floor(math.log10(step)))
    return round(value, digits) if digits < 300 else value
