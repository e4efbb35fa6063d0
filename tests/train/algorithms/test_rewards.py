"""Reward scaling and shaping, by hand and compared with plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.policy_configs import GRPOConfig, RewardScalingConfig
from rl_train.algorithms.rewards import RewardShaping, clip_advantages, overlong_penalty, scale_rewards
from rl_train.config.schema import DataConfig, LossConfig, RunConfig


def shaping(**fields):
    config = GRPOConfig(**fields)
    generation = GenerationConfig(backend="x", max_new_tokens=10)
    policy = PolicyConfig(backend="x", model_name="x", generation=generation)
    return RewardShaping(
        config, RunConfig(algorithm_name="grpo", algorithm=config, loss_fn=LossConfig(), policy=policy, data=DataConfig())
    )


def rollouts(lengths, rewards):
    return BatchedDataDict(
        {
            "rewards": torch.tensor(rewards),
            "reward_parts": [{"reward": r} for r in rewards],
            "token_mask": (torch.arange(12) < torch.tensor(lengths).unsqueeze(1)).float(),
        }
    )


def test_the_overlong_penalty_starts_in_the_buffer_and_is_full_at_the_limit():
    lengths = torch.tensor([0, 6, 7, 8, 10, 11])
    found = overlong_penalty(lengths, limit=10, buffer=4, penalty=0.5)
    assert found.tolist() == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5]


@given(length=st.integers(0, 40), limit=st.integers(2, 30), buffer=st.integers(1, 10), penalty=st.floats(0.1, 3))
def test_the_overlong_penalty_is_equation_13_of_dapo(length, limit, buffer, penalty):
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer * penalty
    else:
        expected = -penalty
    found = overlong_penalty(torch.tensor([length]), limit=limit, buffer=buffer, penalty=penalty)
    assert float(found) == pytest.approx(expected, abs=1e-5)


@given(reward=st.floats(-10, 10), low=st.floats(-3, 0), width=st.floats(0.5, 4), target=st.floats(-2, 2), out=st.floats(0.5, 4))
def test_reward_scaling_is_linear_and_clipped(reward, low, width, target, out):
    config = RewardScalingConfig(
        enabled=True, source_min=low, source_max=low + width, target_min=target, target_max=target + out
    )
    held = min(max(reward, low), low + width)
    expected = target + (held - low) * out / width
    assert float(scale_rewards(torch.tensor(reward, dtype=torch.float64), config)) == pytest.approx(expected, abs=1e-9)


def test_rewards_are_scaled_before_the_length_penalty_which_is_a_separate_reward():
    shape = shaping(
        reward_scaling={"enabled": True, "target_min": -1.0},
        reward_shaping={"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 0.5},
    )
    batch = rollouts([5, 8, 12], [1.0, 0.0, 3.0])
    metrics = shape(batch)
    assert batch["rewards"].tolist() == [1.0, -1.25, 0.5]
    assert [parts["overlong"] for parts in batch["reward_parts"]] == [0.0, -0.25, -0.5]
    assert metrics == {
        "reward/clipped_frac": pytest.approx(1 / 3),
        "reward/overlong": pytest.approx(-0.25),
        "reward/shaped": pytest.approx(0.25 / 3),
    }


def test_a_config_without_shaping_does_not_change_rewards():
    batch = rollouts([5], [7.0])
    assert shaping()(batch) == {}
    assert batch["rewards"].tolist() == [7.0]


def test_the_length_limit_can_be_set_separately():
    shape = shaping(reward_shaping={"enabled": True, "overlong_buffer_length": 2, "max_response_length": 6})
    batch = rollouts([5], [1.0])
    shape(batch)
    assert batch["rewards"].tolist() == [0.5]


def test_advantages_are_clipped_and_counted_on_trained_tokens():
    values, mask = torch.tensor([[-3.0, 0.5, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    clipped, metrics = clip_advantages(values, mask, GRPOConfig(advantage_clip_low=-1.0, advantage_clip_high=2.0))
    assert clipped.tolist() == [[-1.0, 0.5, 2.0]]
    assert metrics == {"advantage/clipped_frac": 0.5}
    one_side, _ = clip_advantages(values, mask, GRPOConfig(advantage_clip_high=2.0))
    assert one_side.tolist() == [[-3.0, 0.5, 2.0]]
    assert clip_advantages(values, mask, GRPOConfig())[1] == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reward_scaling": {"source_min": 1.0, "source_max": 1.0}}, "must be below source_max"),
        ({"reward_scaling": {"target_min": 1.0, "target_max": 0.0}}, "better rewards would become worse"),
        ({"advantage_clip_low": 0.5}, "less than 0"),
        ({"advantage_clip_high": -2.0}, "greater than 0"),
        ({"batch_multiplier": 2.0}, "only used by dynamic sampling"),
        ({"use_dynamic_sampling": True, "adv_estimator": {"name": "reinforce_plus_plus"}}, "learns from these groups"),
        ({"reward_scaling": {"enabled": True}, "adv_estimator": {"name": "gdpo"}}, "does not use the sum"),
    ],
)
def test_unsupported_settings_are_errors_with_a_reason(fields, reason):
    with pytest.raises(ValueError, match=reason):
        GRPOConfig(**fields)
