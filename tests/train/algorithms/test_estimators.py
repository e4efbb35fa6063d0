"""Advantage estimators compared with hand-worked groups and independent loops."""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ComponentImportError, UserError, WrongKindError
from rl_train.algorithms.estimators import AdvantageEstimator, Advantages, make_estimator
from rl_train.algorithms.policy_configs import AdvantageConfig, GRPOConfig
from rl_train.algorithms.rewards import RewardShaping


def batch_of(rewards, groups, *, parts=None, mask=None, kept=None, penalties=None):
    token_mask = torch.ones(len(rewards), 3) if mask is None else torch.tensor(mask)
    batch = {
        "rewards": torch.tensor(rewards),
        "reward_parts": parts or [{"reward": r} for r in rewards],
        "group_ids": torch.tensor(groups),
        "token_mask": token_mask,
        "sample_mask": torch.ones(len(rewards)) if kept is None else torch.tensor(kept),
    }
    if penalties is not None:
        batch["token_penalties"] = torch.tensor(penalties)
    return BatchedDataDict(batch)


def estimate(batch, **config):
    return make_estimator(AdvantageConfig(**config))(batch).values


def are_equal(values):
    return max(values) - min(values) <= 1e-6 * max(1.0, *(abs(v) for v in values))


def normalised(values, deviation=statistics.pstdev):
    if not values or are_equal(values):
        return [0.0] * len(values)
    centre, spread = statistics.fmean(values), deviation(values)
    return [(v - centre) / spread for v in values]


def within_groups(rewards, groups):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(mine) == 1 or are_equal(mine):
            out.append(0.0)
        else:
            out.append((reward - statistics.fmean(mine)) / statistics.stdev(mine))
    return out


ROWS = st.lists(
    st.tuples(st.floats(-5, 5, width=16), st.floats(-5, 5, width=16), st.integers(0, 3), st.integers(0, 7), st.booleans()),
    min_size=1,
    max_size=16,
)


def drawn(rows):
    """A batch of two rewards a row, of masks from three bits, of rows that are left out, and of penalties."""
    mask = [[float(bits >> t & 1) for t in range(3)] for *_, bits, _ in rows]
    penalties = [[0.25 * (b + t) * m for t, m in enumerate(row)] for b, row in enumerate(mask)]
    return batch_of(
        [a + b for a, b, *_ in rows],
        [group for _, _, group, *_ in rows],
        parts=[{"a": a, "b": b} for a, b, *_ in rows],
        mask=mask,
        kept=[float(kept) for *_, kept in rows],
        penalties=penalties,
    )


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_reinforce_plus_plus_equals_a_loop_over_tokens(rows):
    batch = drawn(rows)
    for minus_baseline in (False, True):
        rewards = batch["rewards"].tolist()
        if minus_baseline:
            groups = batch["group_ids"].tolist()
            means = {g: statistics.fmean(r for r, h in zip(rewards, groups, strict=True) if h == g) for g in groups}
            rewards = [r - means[g] for r, g in zip(rewards, groups, strict=True)]
        places, values = [], []
        for b, reward in enumerate(rewards):
            for t in range(3):
                if batch["token_mask"][b, t] * batch["sample_mask"][b]:
                    places.append((b, t))
                    values.append(reward - sum(float(batch["token_penalties"][b, s]) for s in range(t, 3)))
        expected = torch.zeros(len(rows), 3)
        for place, value in zip(places, normalised(values), strict=True):
            expected[place] = value
        found = estimate(batch, name="reinforce_plus_plus", minus_baseline=minus_baseline)
        # Rewards are float32, and groups that are equal but for rounding are set to zero before the baseline is taken.
        assert torch.allclose(found, expected, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_gdpo_equals_a_loop_over_rewards_and_rows(rows):
    batch = drawn(rows)
    groups = batch["group_ids"].tolist()
    by_part = {name: within_groups([part[name] for part in batch["reward_parts"]], groups) for name in ("a", "b")}
    total = [2.0 * a + 0.5 * b for a, b in zip(by_part["a"], by_part["b"], strict=True)]
    trained = [b for b in range(len(rows)) if batch["sample_mask"][b] and batch["token_mask"][b].sum()]
    whitened = dict(zip(trained, normalised([total[b] for b in trained], statistics.stdev), strict=True))
    for of_batch in (False, True):
        found = estimate(batch, name="gdpo", reward_weights={"a": 2.0, "b": 0.5}, normalize_batch=of_batch)
        for b in range(len(rows)):
            expected = whitened.get(b, 0.0) if of_batch else total[b]
            for t in range(3):
                assert float(found[b, t]) == pytest.approx(expected * float(batch["token_mask"][b, t]), rel=1e-4, abs=1e-4)


def test_gdpo_distinguishes_rewards_with_equal_sums():
    # Sums of 1 by different rewards: GRPO values rows 0 and 1 alike; the second reward is rarer, so it is worth more.
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]
    batch = batch_of([1.0, 1.0, 1.0, 0.0], [0] * 4, parts=parts)
    together = estimate(batch, name="grpo")[:, 0].tolist()
    apart = estimate(batch, name="gdpo", normalize_batch=False)[:, 0].tolist()
    assert together[0] == together[1]
    # a: mean 1/2, deviation sqrt(1/3); b: mean 1/4, deviation 1/2
    assert apart[0] == pytest.approx(0.5 / math.sqrt(1 / 3) - 0.5, rel=1e-5)
    assert apart[1] == pytest.approx(-0.5 / math.sqrt(1 / 3) + 1.5, rel=1e-5)


def test_gdpo_continues_without_a_reward_that_no_row_has_and_warns_once(own_messages):
    config = AdvantageConfig(name="gdpo", reward_weights={"tone": 3.0, "a": 1.0})
    estimator, plain = make_estimator(config), make_estimator(AdvantageConfig(name="gdpo"))
    without = batch_of([1.0, 0.0], [0, 0], parts=[{"a": 1.0}, {"a": 0.0, "b": 0.5}])
    for _ in range(2):
        assert estimator.is_informative(without).tolist() == [True, True]
        assert torch.equal(estimator(without).values, plain(without).values)
    [warning] = own_messages()
    assert "reward_weights names tone" in warning
    assert "returned a, b" in warning
    # A step that has it counts it.
    later = batch_of([1.0, 0.0], [0, 0], parts=[{"a": 1.0, "tone": 0.0}, {"a": 0.0, "tone": 1.0}])
    assert estimator(later).values[:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert len(own_messages()) == 1


def test_gdpo_divides_by_the_unbiased_deviation_of_the_batch():
    # Centred rewards 1, -1, 3, -3 over four rows: their squares sum to 20, divided by n - 1.
    batch = batch_of([2.0, 0.0, 6.0, 0.0], [0, 0, 1, 1])
    found = estimate(batch, name="gdpo", normalize_rewards=False)[:, 0]
    assert found.tolist() == pytest.approx([value / (20 / 3) ** 0.5 for value in (1.0, -1.0, 3.0, -3.0)])


def test_the_weight_of_the_length_penalty_changes_the_advantages_of_gdpo():
    parts = [{"right": 1.0, "overlong": -0.5}, {"right": 0.0, "overlong": 0.0}, {"right": 1.0, "overlong": 0.0}]
    batch = batch_of([0.5, 0.0, 1.0], [0, 0, 0], parts=parts)
    found = [
        estimate(batch, name="gdpo", reward_weights={"overlong": weight}, normalize_batch=False)[0, 0].item()
        for weight in (0.0, 0.5, 1.0)
    ]
    # Both are 1/3 from their means; their deviations (n - 1) are sqrt(1/3) and sqrt(1/12).
    right, overlong = (1 / 3) / (1 / 3) ** 0.5, (-1 / 3) / (1 / 12) ** 0.5
    assert found == pytest.approx([right + weight * overlong for weight in (0.0, 0.5, 1.0)])


def test_rloo_by_hand():
    # 4 - mean(1, 1), 1 - mean(4, 1), 1 - mean(4, 1); and no division
    assert estimate(batch_of([4.0, 1.0, 1.0], [7] * 3), name="rloo")[:, 1].tolist() == pytest.approx([3.0, -1.5, -1.5])
    normalised_ = estimate(batch_of([4.0, 1.0, 1.0], [7] * 3), name="rloo", normalize_rewards=True)[:, 1]
    assert normalised_.tolist() == pytest.approx([v / math.sqrt(3) for v in (3.0, -1.5, -1.5)])


def test_the_kl_in_the_reward_is_a_row_sum_in_grpo_and_a_token_return_in_reinforce_plus_plus():
    penalties = [[0.0, 0.25, 0.25], [0.0, 0.0, 0.0]]
    batch = batch_of([1.0, 1.0], [0, 0], mask=[[0.0, 1, 1], [0.0, 1, 1]], penalties=penalties)
    # rewards of 0.5 and 1, mean 0.75
    of_rows = estimate(batch, name="grpo", normalize_rewards=False)
    assert of_rows.tolist() == [[0.0, -0.25, -0.25], [0.0, 0.25, 0.25]]
    # returns 0.5, 0.75, 1, 1: mean 0.8125
    of_tokens = estimate(batch, name="reinforce_plus_plus")
    returns = [0.5, 0.75, 1.0, 1.0]
    expected = [(r - 0.8125) / statistics.pstdev(returns) for r in returns]
    assert of_tokens[:, 1:].flatten().tolist() == pytest.approx(expected, rel=1e-5)
    assert of_tokens[:, 0].tolist() == [0.0, 0.0]


def test_a_batch_of_equal_rewards_has_zero_advantages():
    for name in ("grpo", "rloo", "reinforce_plus_plus", "gdpo"):
        assert not estimate(batch_of([0.7] * 4, [0, 0, 1, 1]), name=name).any()


def test_groups_are_checked_for_equal_rewards_per_named_reward():
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    batch = batch_of([1.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], parts=parts)
    assert make_estimator(AdvantageConfig()).is_informative(batch).tolist() == [False] * 4
    assert make_estimator(AdvantageConfig(name="gdpo")).is_informative(batch).tolist() == [True, True, False, False]
    only_a = AdvantageConfig(name="gdpo", reward_weights={"b": 0.0})
    assert make_estimator(only_a).is_informative(batch).tolist() == [True, True, False, False]


class Constant(AdvantageEstimator):
    """A third-party estimator."""

    def __init__(self, *, worth):
        self.worth = worth

    def __call__(self, batch):
        return Advantages(values=self.worth * batch["token_mask"], metrics={})


def test_an_estimator_may_be_given_by_its_path(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "acme_estimators", sys.modules[__name__])
    found = estimate(batch_of([1.0], [0]), name="acme_estimators.Constant", kwargs={"worth": 2.0})
    assert found.tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(WrongKindError, match="is not a AdvantageEstimator"):
        make_estimator(AdvantageConfig(name="acme_estimators.batch_of"))
    with pytest.raises(ComponentImportError):
        make_estimator(AdvantageConfig(name="missing_estimators.Constant"))


REFUSED = {
    "an unknown name": ({"name": "grpoo"}, "grpo, rloo, reinforce_plus_plus, gdpo"),
    "RLOO without leaving one out": ({"name": "rloo", "use_leave_one_out_baseline": False}, "uses the leave-one-out"),
    "a batch that is normalised by groups": ({"name": "reinforce_plus_plus", "normalize_rewards": True}, "normalize_rewards"),
    "weights of one reward": ({"reward_weights": {"a": 1.0}}, "does not use reward_weights"),
    "a baseline that is there already": ({"minus_baseline": True}, "does not use minus_baseline"),
    "arguments for our own": ({"kwargs": {"x": 1}}, "does not use kwargs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_an_estimator_would_ignore_are_refused(case):
    fields, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        AdvantageConfig(**fields)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(0, 5, width=16), st.integers(0, 3)), min_size=1, max_size=12))
def test_max_rl_divides_by_the_mean_reward_of_the_group(rows):
    rewards, groups = map(list, zip(*rows, strict=True))
    found = estimate(batch_of(rewards, groups), name="max_rl")[:, 0].tolist()
    for reward, group, advantage in zip(rewards, groups, found, strict=True):
        mine = [r for r, g in rows if g == group]
        mean = statistics.fmean(mine)
        # float32 results.
        assert advantage == pytest.approx(0.0 if are_equal(mine) else (reward - mean) / mean, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_expected_gradient_of_max_rl_is_that_of_the_likelihood_expanded_to_the_order_of_the_group(size, p):
    # A policy that succeeds with probability p, and whose parameter is p: the score is 1/p of a success, and -1/(1 - p) of a
    # failure. All outcomes of a group are enumerated. log p = -sum over k of (1 - p)^k / k has the derivative of the sum.
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        advantages = estimate(batch_of(list(outcome), [0] * size), name="max_rl")[:, 0].tolist()
        scores = [1 / p if r else -1 / (1 - p) for r in outcome]
        probability = math.prod(p if r else 1 - p for r in outcome)
        expected += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / size
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, size)), rel=1e-5)


def test_max_rl_refuses_negative_rewards_but_not_those_of_unscored_rollouts():
    with pytest.raises(UserError, match=r"max_rl .* found -0.5.*reward_scaling"):
        estimate(batch_of([1.0, -0.5], [0, 0]), name="max_rl")
    batch = batch_of([1.0, 0.0, -1.0], [0, 0, 0])
    batch["scored"] = torch.tensor([True, True, False])
    assert estimate(batch, name="max_rl")[:, 0].tolist() == [1.0, -1.0, 0.0]


def optimal_baseline_by_loop(rewards, groups, masks, penalties, probabilities):
    """The formula of the paper, with the square of p as the sum of all squares, token by token; lists of rows."""
    found = [[0.0] * len(mask) for mask in masks]
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        if are_equal([rewards[i] - sum(penalties[i]) for i in members]):
            continue
        positions = {i: [t for t, m in enumerate(masks[i]) if m] for i in members}
        for k in range(max(len(at) for at in positions.values())):
            terms = []
            for i in [i for i in members if len(positions[i]) > k]:
                energy = sum(1 - 2 * probabilities[i][t] + probabilities[i][t] ** 2 for t in positions[i][: k + 1])
                terms.append((i, energy, rewards[i] - sum(penalties[i][t] for t in positions[i][k:])))
            total = sum(energy for _, energy, _ in terms)
            baseline = sum(energy * value for _, energy, value in terms) / total if len(terms) > 1 else 0.0
            for i, _, value in terms:
                found[i][positions[i][k]] = value - baseline
    return found


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 1000))
def test_the_optimal_token_baseline_equals_a_loop_over_tokens(rows, seed):
    batch = drawn(rows)
    probabilities = 0.05 + 0.9 * torch.rand(batch["token_mask"].shape, generator=torch.Generator().manual_seed(seed))
    batch["generation_logprobs"] = probabilities.log()
    found = estimate(batch, name="optimal_token_baseline")
    expected = optimal_baseline_by_loop(
        batch["rewards"].tolist(),
        batch["group_ids"].tolist(),
        batch["token_mask"].tolist(),
        batch["token_penalties"].tolist(),
        probabilities.tolist(),
    )
    # float32 results of sums of up to 16 terms of size 5.
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_optimal_token_baseline_of_equally_likely_tokens_is_the_mean_of_the_group():
    batch = batch_of([1.0, 0.0, 0.0, 3.0], [0, 0, 1, 1])
    for logprob in (-0.7, 0.0):  # at probability 1, energies are 0
        batch["generation_logprobs"] = torch.full((4, 3), logprob)
        found = estimate(batch, name="optimal_token_baseline")
        assert torch.allclose(found, estimate(batch, name="grpo", normalize_rewards=False), atol=1e-6)


def test_the_optimal_token_baseline_has_the_least_variance_of_all_baselines_of_a_token():
    # One token, two actions of probability 0.9 and 0.1 with rewards 1 and 0; theta is the difference of their logits.
    probabilities, rewards, scores = [0.9, 0.1], [1.0, 0.0], [0.1, -0.9]
    batch = batch_of([1.0] * 9 + [0.0], [0] * 10, mask=[[1.0]] * 10)
    batch["generation_logprobs"] = torch.tensor([[0.9]] * 9 + [[0.1]]).log()
    baseline = 1.0 - float(estimate(batch, name="optimal_token_baseline")[0, 0])

    def variance(baseline):
        terms = [(p, s * (r - baseline)) for p, s, r in zip(probabilities, scores, rewards, strict=True)]
        mean = sum(p * term for p, term in terms)
        return sum(p * (term - mean) ** 2 for p, term in terms)

    assert baseline == pytest.approx(0.1)  # the mean is 0.9
    assert all(variance(baseline) <= variance(baseline + shift) for shift in (-0.3, -1e-3, 1e-3, 0.8))


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8))
def test_the_energy_of_a_token_without_the_other_probabilities_is_within_a_factor_of_2(weights):
    probabilities = [w / sum(weights) for w in weights]
    for p in probabilities:
        energy = 1 - 2 * p + sum(other * other for other in probabilities)
        assert (1 - p) ** 2 * (1 - 1e-9) <= energy <= 2 * (1 - p) ** 2 * (1 + 1e-9)


@pytest.mark.parametrize("name", ["max_rl", "optimal_token_baseline", "remax"])
def test_estimators_without_settings_refuse_those_of_others(name):
    with pytest.raises(ValidationError, match="does not use normalize_rewards"):
        AdvantageConfig(name=name, normalize_rewards=True)
    with pytest.raises(ValidationError, match="does not use turn_discount"):
        AdvantageConfig(name=name, turn_discount=0.5)


def test_max_rl_refuses_penalties_that_make_rewards_negative():
    with pytest.raises(ValidationError, match="max_rl divides by the mean reward"):
        GRPOConfig(adv_estimator={"name": "max_rl"}, reward_shaping={"enabled": True})


def with_baselines(batch, baselines):
    return BatchedDataDict({**batch, "baseline_rewards": torch.tensor(baselines, dtype=torch.float32)})


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, baselines=st.lists(st.floats(-5, 5, width=16), min_size=4, max_size=4))
def test_remax_equals_the_formula_of_the_paper_at_every_token(rows, baselines):
    of_rows = [baselines[group] for _, _, group, *_ in rows]
    batch = with_baselines(drawn(rows), of_rows)
    batch["scored"] = torch.tensor([kept for *_, kept in rows])
    found = estimate(batch, name="remax")
    for b, (first, second, *_, kept) in enumerate(rows):
        for t in range(3):
            to_go = first + second - sum(float(batch["token_penalties"][b, s]) for s in range(t, 3))
            expected = (to_go - of_rows[b]) * float(batch["token_mask"][b, t]) * kept
            # float32 sums of numbers up to 15.
            assert float(found[b, t]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_expected_gradient_of_remax_is_that_of_the_reward_for_any_number_of_samples(size, p):
    # One token, two actions of probability p and 1 - p with rewards 1.5 and 0.25; theta is the difference of their logits, and
    # d log p / d theta is 1 - p of the first action and -p of the second. The greedy action is the more likely one.
    rewards, scores = (1.5, 0.25), (1 - p, -p)
    baseline, gradient = rewards[0] if p >= 0.5 else rewards[1], 0.0
    for actions in itertools.product((0, 1), repeat=size):
        batch = batch_of([rewards[a] for a in actions], [0] * size, mask=[[1.0]] * size)
        advantages = estimate(with_baselines(batch, [baseline] * size), name="remax")[:, 0].tolist()
        probability = math.prod(p if a == 0 else 1 - p for a in actions)
        gradient += probability * sum(value * scores[a] for value, a in zip(advantages, actions, strict=True)) / size
    # The reward is 1.5 p + 0.25 (1 - p), and dp / dtheta = p (1 - p).
    assert gradient == pytest.approx(1.25 * p * (1 - p), rel=1e-5)


def test_remax_learns_from_groups_whose_rewards_are_equal_but_differ_from_the_greedy_one():
    batch = with_baselines(batch_of([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2]), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    estimator = make_estimator(AdvantageConfig(name="remax"))
    found = estimator(batch)
    assert found.values[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, -1.0]
    assert estimator.is_informative(batch).tolist() == [True, True, False, False, True, True]
    assert found.metrics["advantage/equal_group_frac"] == pytest.approx(1 / 3)
    assert found.metrics["advantage/baseline"] == pytest.approx(1 / 3)


def test_the_reward_of_the_greedy_rollout_is_scaled_like_the_others():
    scaled = {"enabled": True, "source_max": 4.0, "target_min": -1.0, "target_max": 1.0}
    config = GRPOConfig(adv_estimator={"name": "remax"}, reward_scaling=scaled)
    batch = with_baselines(batch_of([4.0, 0.0], [0, 0]), [2.0, 2.0])
    RewardShaping(config, SimpleNamespace(policy=SimpleNamespace(generation=None)))(batch)
    assert batch["baseline_rewards"].tolist() == [0.0, 0.0]
    assert estimate(batch, name="remax")[:, 0].tolist() == [1.0, -1.0]


def test_remax_refuses_rollouts_without_a_greedy_one_and_penalties_that_it_does_not_have():
    with pytest.raises(UserError, match=r"greedy rollout of each prompt, which these rollouts do not have\. Replay a run"):
        estimate(batch_of([1.0], [0]), name="remax")
    with pytest.raises(ValidationError, match="a greedy answer, which is not penalized"):
        GRPOConfig(adv_estimator={"name": "remax"}, reward_shaping={"enabled": True})
