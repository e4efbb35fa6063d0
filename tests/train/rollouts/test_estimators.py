"""pass@k and cons@k compared with enumerated subsets and cases worked by hand."""

import itertools
import math
import statistics
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_train.rollouts.evaluation import consensus_at_k, estimate, pass_at_k

EXACT = 1e-12
"""Both sides count in whole numbers or fractions; only the last division rounds, to 1e-16."""


def passed_by_hand(right, k):
    subsets = list(itertools.combinations(right, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def voted_by_hand(answers, right, k):
    total, subsets = Fraction(0), list(itertools.combinations(range(len(answers)), k))
    for subset in subsets:
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        if not votes:
            continue
        tied = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += Fraction(sum(right[answers.index(answer)] for answer in tied), len(tied))
    return float(total / len(subsets))


@st.composite
def samples(draw):
    answers = draw(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=9))
    truth = draw(st.sampled_from(["a", "b", "z"]))
    return answers, [answer == truth for answer in answers], draw(st.integers(1, len(answers)))


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.data())
@settings(max_examples=200, deadline=None)
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_sample(right, data):
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(passed_by_hand(right, k), abs=EXACT)


@given(samples())
@settings(max_examples=300, deadline=None)
def test_consensus_is_the_mean_of_the_vote_over_all_subsets(case):
    answers, right, k = case
    assert consensus_at_k(answers, right, k) == pytest.approx(voted_by_hand(answers, right, k), abs=EXACT)


@given(samples(), st.randoms())
@settings(max_examples=50, deadline=None)
def test_consensus_does_not_depend_on_the_order_of_the_samples(case, random):
    answers, right, k = case
    order = list(range(len(answers)))
    random.shuffle(order)
    shuffled = consensus_at_k([answers[i] for i in order], [right[i] for i in order], k)
    assert shuffled == consensus_at_k(answers, right, k)


@given(samples())
@settings(max_examples=100, deadline=None)
def test_with_one_sample_pass_and_consensus_equal_accuracy(case):
    answers, right, _ = case
    assert pass_at_k(len(right), sum(right), 1) == pytest.approx(statistics.fmean(right), abs=EXACT)
    assert consensus_at_k(answers, right, 1) == pytest.approx(statistics.fmean(right), abs=EXACT)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right one
        (5, 2, 3, 9 / 10),  # only the triple of the three wrong ones fails
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (8, 3, 6, 1.0),  # six of eight cannot all be among the five wrong ones
        (200, 1, 100, 1 / 2),
    ],
)
def test_pass_at_k_of_cases_worked_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["a", "a", "b"], 3, 1.0),
        (["a", "b", "b"], 3, 0.0),
        (["a", "b"], 2, 1 / 2),  # a tie of two, each taken half of the time
        (["a", "b", "c"], 3, 1 / 3),  # a tie of three
        (["a", "a", "b"], 2, 2 / 3),  # aa wins, ab and ab are ties
        (["a", "a", "b", "b", "b"], 3, 3 / 10),  # aab three times of ten
        (["a", None, None], 3, 1.0),  # who has no answer does not vote
        (["a", None, None], 2, 2 / 3),  # the pair of the two without an answer is wrong
        ([None, None], 2, 0.0),
    ],
)
def test_consensus_of_cases_worked_by_hand(answers, k, expected):
    assert consensus_at_k(answers, [answer == "a" for answer in answers], k) == pytest.approx(expected, abs=EXACT)


def test_an_answer_that_is_right_in_some_samples_counts_by_its_share():
    assert consensus_at_k(["a", "a", "a", "a"], [True, False, False, False], 3) == pytest.approx(0.25, abs=EXACT)


def test_many_samples_of_many_answers_are_counted_exactly():
    # A million million million subsets; of 40 right and 24 equal wrong votes, an odd majority is hypergeometric.
    answers = ["a"] * 40 + ["b"] * 24
    k = 31
    expected = sum(math.comb(40, j) * math.comb(24, k - j) for j in range(16, k + 1)) / math.comb(64, k)
    assert consensus_at_k(answers, [answer == "a" for answer in answers], k) == pytest.approx(expected, abs=EXACT)
    every_other = [str(i // 2) for i in range(64)]
    assert consensus_at_k(every_other, [answer == "0" for answer in every_other], 64) == pytest.approx(1 / 32, abs=EXACT)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_cannot_exceed_the_number_of_samples(k):
    with pytest.raises(ValueError, match=f"k is {k}, but must be from 1 to 3"):
        pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match="must be from 1 to 3"):
        consensus_at_k(["a", "b", "c"], [True, False, False], k)


def test_more_correct_samples_than_samples_is_an_error():
    with pytest.raises(ValueError, match="4 of 3 samples"):
        pass_at_k(3, 4, 1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
@settings(max_examples=50, deadline=None)
def test_the_standard_error_is_the_standard_deviation_over_the_root_of_the_number_of_prompts(values):
    found = estimate(values)
    assert found.value == pytest.approx(statistics.fmean(values), abs=EXACT)
    # The textbook's square root of a sum of squares: equal up to rounding of values near 1.
    assert found.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)


def test_one_prompt_has_no_standard_error_and_none_has_no_mean():
    assert estimate([0.5]).standard_error is None
    with pytest.raises(ValueError, match="over zero prompts"):
        estimate([])
