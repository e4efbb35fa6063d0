"""Advantages compared with hand-worked groups and an independent loop."""

import math
import statistics

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rl_train.algorithms.estimators import group_advantages


def advantages(rewards, groups, **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **options).values.tolist()


def by_loop(rewards, groups, *, normalize, leave_one_out):
    out = []
    for i, group in enumerate(groups):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        if not others or max(mine) - min(mine) <= 1e-6 * max(1.0, max(abs(r) for r in mine)):
            out.append(0.0)
            continue
        centre = statistics.fmean(others) if leave_one_out else statistics.fmean(mine)
        out.append((rewards[i] - centre) / (statistics.stdev(mine) if normalize else 1.0))
    return out


@given(
    rows=st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=40),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_advantages_equal_a_plain_loop_for_any_row_order(rows, normalize, leave_one_out):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    expected = by_loop(rewards, groups, normalize=normalize, leave_one_out=leave_one_out)
    found = advantages(rewards, groups, normalize=normalize, leave_one_out=leave_one_out)
    # Both compute in float64 and differ by the order of sums; the result is rounded to float32.
    for a, b in zip(found, expected, strict=True):
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6)


def test_one_odd_reward_does_not_blow_up_under_leave_one_out_with_normalisation():
    found = advantages([0.0] + [0.95] * 7, [0] * 8, leave_one_out=True)
    # centre of the others 0.95; one deviation for the group: sqrt(8 * (7/64) * 0.95^2 / 7) = 0.95 * sqrt(1/8)
    assert found[0] == pytest.approx(-math.sqrt(8), rel=1e-5)
    assert max(abs(a) for a in found) < 3.0


def test_two_samples_with_leave_one_out_still_have_a_deviation():
    assert advantages([1.0, 0.0], [5, 5], leave_one_out=True) == pytest.approx([math.sqrt(2), -math.sqrt(2)], rel=1e-6)


def test_a_group_with_equal_rewards_has_zero_advantage_and_is_counted():
    found = group_advantages(torch.tensor([0.7] * 4 + [1.0, 0.0]), torch.tensor([0] * 4 + [1] * 2))
    assert found.values[:4].tolist() == [0.0] * 4
    assert found.equal_group_frac == 0.5


def test_rounding_noise_in_rewards_counts_as_zero_deviation():
    noise = [0.95, 0.95 + 6e-8, 0.95 - 6e-8, 0.95]
    assert advantages(noise, [0] * 4) == [0.0] * 4


def test_groups_are_identified_by_id_not_position():
    apart = advantages([1.0, 5.0, 0.0, 7.0], [3, 9, 3, 9], normalize=False)
    assert apart == pytest.approx([0.5, -1.0, -0.5, 1.0])


def test_advantages_of_a_group_sum_to_zero():
    found = group_advantages(torch.rand(64), torch.arange(64) // 8).values.view(8, 8)
    assert found.sum(dim=1).abs().max() < 1e-5
