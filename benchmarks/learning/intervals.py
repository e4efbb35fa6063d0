"""Intervals of 95 % for success rates and their differences."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from math import sqrt

RESAMPLES = 4000
Z = 1.959964


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion of independent trials (Wilson 1927)."""
    share, spread = successes / trials, Z * Z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z * sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return centre - half, centre + half


def difference(problems: Sequence[str], before: Sequence[bool], after: Sequence[bool]) -> tuple[float, float]:
    """Percentile bootstrap of the mean difference, paired, and resampled over distinct problems.

    Trials on the same problem are not independent, so a problem is drawn with all of its trials.

    Args:
        problems: The problem of each trial.
        before: Whether each trial succeeded before training.
        after: The same after it, in the same order.
    """
    clusters: dict[str, list[int]] = defaultdict(list)
    for problem, old, new in zip(problems, before, after, strict=True):
        clusters[problem].append(int(new) - int(old))
    sums = [(sum(values), len(values)) for values in clusters.values()]
    draw, means = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = draw.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
