"""Exact estimates of pass@k and cons@k from n samples per prompt."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    value: float
    standard_error: float | None
    """Standard error of the mean over prompts; None for a single prompt."""


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of P values, one per prompt, with the standard error s / sqrt(P), where s is the unbiased standard deviation.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("cannot average over zero prompts")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(value=mean, standard_error=None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(value=mean, standard_error=math.sqrt(variance / count))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of the n samples, drawn without replacement, contain a correct one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k new samples; computed with integers.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.

    Args:
        num_samples: n.
        num_correct: c, number of correct samples.
        k: number of samples drawn.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    _check_draw(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be correct")
    every = math.comb(num_samples, k)
    return float(Fraction(every - math.comb(num_samples - num_correct, k), every))


def consensus_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the majority answer of k of the n samples, drawn without replacement, is correct.

    The mean over all C(n, k) subsets, not the vote of the first k, which would leave n - k samples unused and depend on their
    order. Ties are broken uniformly, which equals choosing the first answer on average over the order of the samples. None is
    not a vote; without votes, the majority is wrong. An answer that is correct in some samples and wrong in others counts by
    the fraction of its samples that are correct.

    Source: Wang et al. 2022 (self-consistency), https://arxiv.org/abs/2203.11171; here unbiased for every k up to n.

    Args:
        answers: n answers; equal answers are votes for the same.
        correct: whether each sample is correct.
        k: number of samples drawn.

    Raises:
        ValueError: not 1 <= k <= n, or the lengths differ.
    """
    _check_draw(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    hits: Counter[Hashable] = Counter()
    for answer, is_correct in zip(answers, correct, strict=True):
        hits[answer] += is_correct
    # Sorted, so that the result is cached for prompts with the same votes.
    classes = tuple(sorted((count, hits[answer]) for answer, count in votes.items()))
    return _majority_accuracy(classes, len(answers), k)


@lru_cache(maxsize=4096)
def _majority_accuracy(classes: tuple[tuple[int, int], ...], num_samples: int, k: int) -> float:
    """`consensus_at_k` from `classes`, the votes and the number of correct samples of each answer."""
    most = max((count for count, _ in classes), default=0)
    won = sum((_wins_with(classes, num_samples, k, winner) for winner in range(1, min(most, k) + 1)), Fraction(0))
    return float(won / math.comb(num_samples, k))


def _wins_with(classes: Sequence[tuple[int, int]], num_samples: int, k: int, winner: int) -> Fraction:
    """Number of subsets whose majority has exactly `winner` votes, weighted by the fraction of correct ones in tied answers.

    Answers with fewer than `winner` votes in total cannot win: together with samples that do not vote they form a pool from
    which any number may be drawn. The others are added one by one: `ways[drawn, tied]` counts their subsets with `drawn`
    samples in which `tied` answers have `winner` votes, and `weight` sums the fractions of correct ones of those answers.
    """
    rivals = [(count, hit) for count, hit in classes if count >= winner]
    pool = num_samples - sum(count for count, _ in rivals)
    ways: Mapping[tuple[int, int], int] = {(0, 0): 1}
    weight: Mapping[tuple[int, int], Fraction] = {}
    for count, hit in rivals:
        fraction = Fraction(hit, count)
        more_ways: defaultdict[tuple[int, int], int] = defaultdict(int)
        more_weight: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for (drawn, tied), number in ways.items():
            for votes in range(min(winner, k - drawn) + 1):
                at = drawn + votes, tied + (votes == winner)
                choices = math.comb(count, votes)
                more_ways[at] += number * choices
                more_weight[at] += choices * (weight.get((drawn, tied), 0) + (number * fraction if votes == winner else 0))
        ways, weight = more_ways, more_weight
    return sum(
        (total / tied * math.comb(pool, k - drawn) for (drawn, tied), total in weight.items() if tied), start=Fraction(0)
    )


def _check_draw(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, but must be from 1 to {num_samples}, the number of samples")
