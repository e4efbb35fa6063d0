"""GAE compared with a float64 loop over the actions of each row, and its mathematical properties."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_train.algorithms.ppo import (
    adaptive_lambda,
    as_targets,
    at_last_trained,
    explained_variance,
    generalized_advantages,
    is_last_trained,
    state_values,
)

NUMBERS = st.floats(-4, 4, width=16)
TOKENS = st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), min_size=1, max_size=12)
SHARES = st.floats(0, 1, width=16)


def row_by_sums(tokens, *, gamma, lam, end):
    """Equation 16 literally, for the actions of a row: the sum of (gamma lam)^l delta_(k+l)."""
    actions = [(reward, value) for trained, reward, value in tokens if trained]
    values = [value for _, value in actions] + [end]
    deltas = [reward + gamma * values[k + 1] - values[k] for k, (reward, _) in enumerate(actions)]
    sums = [math.fsum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[k:])) for k, _ in enumerate(deltas)]
    found = iter(sums)
    return [next(found) if trained else 0.0 for trained, *_ in tokens]


def tensors(rows):
    width = max(len(row) for row in rows)
    padded = [[*row, *[(False, 7.0, -7.0)] * (width - len(row))] for row in rows]
    return (torch.tensor([[float(token[k]) for token in row] for row in padded]) for k in (1, 2, 0))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(TOKENS, min_size=1, max_size=4), gamma=SHARES, lam=SHARES, ends=st.lists(NUMBERS, min_size=4, max_size=4))
def test_advantages_equal_a_sum_of_residuals_over_the_actions_of_each_row(rows, gamma, lam, ends):
    rewards, values, mask = tensors(rows)
    bootstrap = torch.tensor(ends[: len(rows)])
    found = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    assert found.dtype == torch.float32
    for b, row in enumerate(rows):
        expected = row_by_sums(row, gamma=gamma, lam=lam, end=ends[b])
        # Both sides are exact in float64 and rounded once to float32.
        assert found[b, : len(row)].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert not found[b, len(row) :].any()


@given(rows=st.lists(TOKENS, min_size=1, max_size=3))
def test_with_lambda_and_gamma_one_an_advantage_is_the_return_less_the_value(rows):
    rewards, values, mask = tensors(rows)
    found = generalized_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    to_come = (rewards * mask).double().flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(found.double(), (to_come - values) * mask, atol=1e-5)


@given(rows=st.lists(TOKENS, min_size=1, max_size=3), gamma=SHARES)
def test_with_lambda_zero_an_advantage_is_the_residual_of_one_step(rows, gamma):
    rewards, values, mask = tensors(rows)
    found = generalized_advantages(rewards, values, mask, gamma=gamma, lam=0.0)
    for b in range(len(rows)):
        trained = mask[b].nonzero().flatten().tolist()
        for here, after in itertools.pairwise([*trained, None]):
            next_value = 0.0 if after is None else float(values[b, after])
            residual = float(rewards[b, here]) + gamma * next_value - float(values[b, here])
            assert float(found[b, here]) == pytest.approx(residual, rel=1e-6, abs=1e-6)


@given(rows=st.lists(TOKENS, min_size=2, max_size=4), gamma=SHARES, lam=SHARES)
def test_padding_other_rows_and_prompt_tokens_do_not_change_advantages(rows, gamma, lam):
    together = generalized_advantages(*tensors(rows), gamma=gamma, lam=lam)
    for b, row in enumerate(rows):
        alone = generalized_advantages(*tensors([row]), gamma=gamma, lam=lam)[0]
        assert torch.equal(together[b, : len(row)], alone)
        only_sampled = [token for token in row if token[0]]
        if only_sampled:
            packed = generalized_advantages(*tensors([only_sampled]), gamma=gamma, lam=lam)[0]
            assert torch.equal(packed, alone[torch.tensor([token[0] for token in row])])


def test_each_row_can_have_its_own_lambda():
    rewards, values, mask = torch.tensor([[0.0, 0.0, 1.0]] * 2), torch.tensor([[0.25, 0.5, 0.5]] * 2), torch.ones(2, 3)
    found = generalized_advantages(rewards, values, mask, gamma=1.0, lam=torch.tensor([0.0, 1.0]))
    assert found.tolist() == [[0.25, 0.0, 0.5], [0.75, 0.5, 0.5]]


def test_length_adaptive_lambda_grows_with_the_answer_length():
    mask = torch.tensor([[0.0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    # 1 - 1 / (0.5 n), at least 0
    assert adaptive_lambda(mask, 0.5).tolist() == pytest.approx([0.0, 0.0, 0.6, 0.0])


def test_state_values_are_shifted_by_one_token_and_back():
    spoken = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert state_values(spoken).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert as_targets(state_values(spoken)).tolist() == [[1.0, 2.0, 3.0, 0.0]]


def test_row_rewards_go_to_the_last_trained_token_with_any_number_of_turns():
    mask = torch.tensor([[0.0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert is_last_trained(mask).nonzero().tolist() == [[0, 4], [1, 1]]
    placed = at_last_trained(torch.tensor([2.0, 3.0, 5.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 0, 2, 0], [0, 3, 0, 0, 0, 0], [0] * 6]


@given(rows=st.lists(TOKENS, min_size=1, max_size=3))
def test_explained_variance_is_that_of_the_trained_states(rows):
    values, returns, mask = tensors(rows)
    pairs = [(v, r) for row in rows for trained, v, r in row if trained]
    found = explained_variance(values, returns, mask)
    if not pairs or max(r for _, r in pairs) - min(r for _, r in pairs) < 1e-3:
        return
    expected = 1 - statistics.pvariance([r - v for v, r in pairs]) / statistics.pvariance([r for _, r in pairs])
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_equal_returns_have_no_explained_variance():
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.1, 0.1 + 1e-8]]), torch.ones(1, 2)) == 0.0
    assert explained_variance(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2)) == 0.0
