"""Turn-level advantages: returns of turns within the group; those of GRPO if only the end is rewarded, without a discount."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.policy_configs import AdvantageConfig, GRPOConfig
from rl_train.rollouts.trajectory import Trajectory, join_segments, to_batch


def batch_of(turn_rewards, group, *, lengths=(2,), rewritten=False, weights=None):
    """A batch of rollouts with these rewards of their turns; `group` rollouts per group."""
    rollouts = []
    for number, rewards in enumerate(turn_rewards):
        place = {"group_id": number // group, "index": 0, "ordinal": number // group, "sample": number % group}
        log = [{"role": "user", "content": "q", "token_ids": torch.tensor([7])}]
        row = Trajectory(message_log=log, metadata=None, task_name="t", reward_weights=weights or {}, **place)
        for turn, reward in enumerate(rewards):
            if turn:
                prompt = {"role": "user", "content": "o"}, torch.tensor([8, 9])
                (row.start_segment if rewritten and turn % 2 else row.add_observation)(*prompt)
            count = lengths[(number + turn) % len(lengths)]
            row.add_answer("a", torch.ones(count, dtype=torch.int64), torch.zeros(count))
            row.add_rewards(reward if isinstance(reward, dict) else {"reward": reward})
        rollouts.append(row)
    return join_segments(to_batch(rollouts))


def by_turn(batch, **config):
    """The advantage of each turn of each rollout; all its tokens must have the same."""
    values = make_estimator(AdvantageConfig(**{"name": "turn_level", **config}))(batch).values
    assert values[batch["token_mask"] == 0].abs().sum() == 0
    found = []
    for rollout in batch["rollout_ids"].unique():
        rows = batch["rollout_ids"] == rollout
        turns, of_rows = batch["token_turns"][rows], values[rows]
        sets = [of_rows[turns == turn].unique() for turn in range(1, int(turns.max()) + 1)]
        assert all(len(each) == 1 for each in sets)
        found.append([float(each) for each in sets])
    return found


def test_advantages_are_normalized_discounted_returns_of_each_turn():
    batch = batch_of([[1.0, 0.0, 4.0], [0.0, 2.0, 0.0], [0.0, 0.0]], 3, lengths=(1, 3))
    # Returns with a discount of 0.5: turn 1 [2, 1, 0], turn 2 [2, 2, 0], turn 3 [4, 0, and 0 of the ended rollout].
    expected = torch.tensor([[2.0, 1.0, 0.0], [2.0, 2.0, 0.0], [4.0, 0.0, 0.0]])
    expected = ((expected - expected.mean(1, keepdim=True)) / expected.std(1, keepdim=True)).T
    found = by_turn(batch, turn_discount=0.5)
    for turns, row in zip(found, expected.tolist(), strict=True):
        assert turns == pytest.approx(row[: len(turns)], rel=1e-6)


REWARDS = st.floats(-4, 4).map(lambda x: round(x, 3))
GROUPS = st.integers(2, 4).flatmap(
    lambda group: st.tuples(
        st.just(group),
        st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=group, max_size=group),
    )
)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.booleans(), st.booleans(), st.booleans())
def test_without_discount_and_with_a_reward_at_the_end_they_are_those_of_grpo(groups, normalize, leave_one_out, rewritten):
    group, turns = groups
    batch = batch_of([[0.0] * (len(rewards) - 1) + rewards[-1:] for rewards in turns], group, rewritten=rewritten)
    config = {"normalize_rewards": normalize, "use_leave_one_out_baseline": leave_one_out}
    outcome = make_estimator(AdvantageConfig(name="grpo", **config))
    turn_level = make_estimator(AdvantageConfig(name="turn_level", **config))
    torch.testing.assert_close(turn_level(batch).values, outcome(batch).values, rtol=1e-5, atol=1e-6)
    assert turn_level(batch).metrics == outcome(batch).metrics
    assert torch.equal(turn_level.is_informative(batch), outcome.is_informative(batch))


@settings(max_examples=60, deadline=None)
# Equal returns of the last turn, which have the rounding of larger sums.
@example((2, [[0.0, 1.0, 4.0, 1.438], [4.0, 3.406, 3.406, 1.438]]), 1.0, 1.5, -1.6218671452148206)
@given(GROUPS, st.floats(0.1, 1.0), st.floats(0.5, 3.0), st.floats(-2.0, 2.0))
def test_scaled_and_shifted_last_rewards_change_no_normalized_advantage(groups, discount, scale, shift):
    group, turns = groups
    longest = max(map(len, turns))
    turns = [rewards + [0.0] * (longest - len(rewards)) for rewards in turns]
    changed = [[scale * reward for reward in rewards[:-1]] + [scale * rewards[-1] + shift] for rewards in turns]
    one, other = (batch_of(each, group) for each in (turns, changed))
    estimate = make_estimator(AdvantageConfig(name="turn_level", turn_discount=discount))
    # Returns that differ by little more than rounding are normalized to differences of size 1.
    torch.testing.assert_close(estimate(other).values, estimate(one).values, rtol=0.05, atol=0.02)


def test_equal_last_turns_have_no_advantage_also_if_rewards_are_shaped():
    batch = batch_of([[0.0, 1.0, 117.1, 1.438], [4.0, 3.406, 223.406, 1.438]], 2)
    batch["rewards"] -= 0.3
    returns = [1.438 - 0.3, 1.438 - 0.3]
    rounded = [float(total) - sum(turns[:-1]) for total, turns in zip(batch["rewards"], batch["turn_rewards"], strict=True)]
    assert rounded == pytest.approx(returns, abs=1e-5)
    assert abs(rounded[0] - rounded[1]) > 2e-6, "float32 totals differ in their rounding"
    assert [turns[-1] for turns in by_turn(batch)] == [0.0, 0.0]
    assert by_turn(batch)[0][0] < -0.7, "earlier turns are compared"


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.floats(0.1, 1.0))
def test_advantages_of_each_turn_have_mean_zero_and_do_not_depend_on_segments(groups, discount):
    group, turns = groups
    longest = max(map(len, turns))
    turns = [rewards + [0.0] * (longest - len(rewards)) for rewards in turns]
    found = by_turn(batch_of(turns, group), turn_discount=discount)
    assert torch.tensor(found).mean(0).tolist() == pytest.approx([0.0] * longest, abs=1e-5)
    assert by_turn(batch_of(turns, group, rewritten=True), turn_discount=discount) == found


def test_weights_of_named_rewards_apply_to_each_turn():
    named = [[{"a": 1.0, "b": 4.0}, {"a": 0.0}], [{"a": 0.0, "b": 0.0}, {"a": 3.0}]]
    plain = [[1.0 + 0.5 * 4.0, 0.0], [0.0, 3.0]]
    found = by_turn(batch_of(named, 2, weights={"b": 0.5}), normalize_rewards=False)
    assert found == by_turn(batch_of(plain, 2), normalize_rewards=False)


def test_a_shaped_reward_counts_in_the_last_turn_and_a_penalty_in_the_turn_of_its_token():
    batch = batch_of([[1.0, 1.0], [0.0, 0.0]], 2, lengths=(1,))
    batch["rewards"] = batch["rewards"] - torch.tensor([1.0, 0.0])
    batch["token_penalties"] = torch.full_like(batch["token_mask"], 9.0)
    batch["token_penalties"][0, batch["token_turns"][0] == 1] = 0.25
    batch["token_penalties"][1] = 0.0
    batch["token_penalties"][0, batch["token_turns"][0] == 2] = 0.0
    found = by_turn(batch, normalize_rewards=False)
    assert found == [[0.375, 0.0], [-0.375, 0.0]]


def test_rows_that_are_not_scored_count_in_no_turn():
    batch = batch_of([[1.0, 0.0], [0.0, 1.0], [9.0]], 3)
    batch["scored"] = torch.tensor([True, True, False])
    found = by_turn(batch, normalize_rewards=False, turn_discount=0.5)
    assert found == [[0.25, -0.5], [-0.25, 0.5], [0.0]]


def test_a_group_with_equal_sums_but_different_turns_is_informative():
    batch = batch_of([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 2)
    informative = make_estimator(AdvantageConfig(name="turn_level")).is_informative(batch)
    assert informative.tolist() == [True, True, False, False]
    assert make_estimator(AdvantageConfig(name="grpo")).is_informative(batch).tolist() == [False] * 4


def test_settings_without_an_effect_are_refused():
    with pytest.raises(ValidationError, match="adv_estimator 'grpo' does not use turn_discount"):
        AdvantageConfig(name="grpo", turn_discount=0.9)
    with pytest.raises(ValidationError, match="adv_estimator turn_level uses the reward of each turn"):
        GRPOConfig(adv_estimator={"name": "turn_level"}, reward_scaling={"enabled": True})
