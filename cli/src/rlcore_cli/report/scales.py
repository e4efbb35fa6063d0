"""Numbers for charts: ticks, number formats, downsampling and moving averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

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
