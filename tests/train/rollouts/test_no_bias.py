"""Asynchronous training does not prefer fast rollouts: trained latencies have the distribution of the synchronous run."""

import random
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from schedule_time import simulate

STEPS, PROMPTS, GROUP = 300, 8, 4
CRITICAL = 1.63
"""Critical value of the two-sample Kolmogorov-Smirnov statistic, times sqrt(n m / (n + m)), at a level of 0.01."""


@cache
def seconds(ordinal, sample):
    return random.Random(f"{ordinal} {sample}").lognormvariate(0.0, 1.0)


def latencies(groups):
    return sorted(seconds(ordinal, sample) for ordinal in groups for sample in range(GROUP))


def distance(one, other):
    """The largest difference of two empirical distribution functions, scaled by their sizes."""
    values, n, m = sorted([*((x, 0) for x in one), *((x, 1) for x in other)]), len(one), len(other)
    counts, largest = [0, 0], 0.0
    for _, side in values:
        counts[side] += 1
        largest = max(largest, abs(counts[0] / n - counts[1] / m))
    return largest * (n * m / (n + m)) ** 0.5


def trained(k, ahead):
    run = simulate(seconds, steps=STEPS, slots=32, train_s=2.0, max_staleness=k, ahead=ahead, prompts=PROMPTS, group_size=GROUP)
    return [ordinal for step in run for ordinal in step.groups]


@pytest.mark.parametrize(("k", "ahead"), [(1, 1), (2, 1), (2, 2), (4, 4)])
def test_trained_latencies_have_the_distribution_of_the_synchronous_run(k, ahead):
    groups, others = trained(k, ahead), range(10**6, 10**6 + STEPS * PROMPTS)  # other prompts, so both samples are independent
    assert len(set(groups)) == STEPS * PROMPTS
    assert distance(latencies(groups), latencies(others)) < CRITICAL
    # Every prompt that was drawn is trained, except those that are in progress at the end.
    assert len(set(range(max(groups) + 1)) - set(groups)) <= ahead * PROMPTS
    assert sorted(trained(0, 0)) == list(range(STEPS * PROMPTS))


def test_a_rule_that_drops_the_slowest_of_two_batches_would_be_noticed():
    groups = []
    for first in range(0, STEPS * PROMPTS, 2 * PROMPTS):
        slowest = {ordinal: max(seconds(ordinal, sample) for sample in range(GROUP)) for ordinal in range(first, first + 16)}
        groups += sorted(slowest, key=slowest.get)[:PROMPTS]
    assert distance(latencies(groups), latencies(range(10**6, 10**6 + STEPS * PROMPTS))) > CRITICAL
