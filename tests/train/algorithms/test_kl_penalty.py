"""The KL in the reward, by hand; the adaptive KL weight by hand, by its properties and over a resume."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.config import AdaptiveKLConfig, ClippedPGLossConfig
from rl_train.algorithms.policy_configs import GRPOConfig
from rl_train.algorithms.rewards import AdaptiveKLController, kl_in_reward
from rl_train.config.schema import DataConfig, LossConfig, RunConfig


def test_the_kl_in_the_reward_is_a_cost_of_each_sampled_token():
    config = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1", use_kl_in_reward=True)
    batch = BatchedDataDict(
        {
            "token_mask": torch.tensor([[0.0, 1, 1]]),
            "prev_logprobs": torch.tensor([[0.0, -1.0, -2.0]]),
            "reference_policy_logprobs": torch.tensor([[-9.0, -1.5, -1.0]]),
        }
    )
    metrics = kl_in_reward(config)(batch)
    assert batch["token_penalties"].tolist()[0] == pytest.approx([0.0, 0.05, -0.1])
    assert metrics == {"kl/reference": pytest.approx(-0.25)}
    assert kl_in_reward(ClippedPGLossConfig()) is None
    assert kl_in_reward(LossConfig()) is None


def adaptive(target=2.0, horizon=100, weight=0.1, **fields):
    return ClippedPGLossConfig(
        reference_policy_kl_penalty=weight,
        reference_policy_kl_type="k1",
        use_kl_in_reward=True,
        adaptive_kl=AdaptiveKLConfig(target=target, horizon=horizon),
        **fields,
    )


def answers(*kls, trained=None):
    """Rows of three tokens, the first of which is the prompt; k1 of the other two sums to the KL of the row."""
    mask = torch.tensor([[0.0, 1.0, 1.0]]).repeat(len(kls), 1)
    if trained is not None:
        mask = mask * torch.tensor(trained, dtype=torch.float32).unsqueeze(1)
    half = torch.tensor(kls).unsqueeze(1) / 2
    return BatchedDataDict(
        {
            "token_mask": mask,
            "prev_logprobs": torch.cat([torch.zeros_like(half), half - 4.0, half - 4.0], dim=1),
            "reference_policy_logprobs": torch.tensor([[-7.0, -4.0, -4.0]]).repeat(len(kls), 1),
        }
    )


def test_a_weight_moves_by_the_clipped_error_and_the_share_of_the_horizon():
    penalize = kl_in_reward(adaptive())
    # Answers of 2.0 and 2.4 nats, 10 % above the target: the weight is to rise by 10 % times 2 / 100.
    rows = answers(2.0, 2.4)
    metrics = penalize(rows)
    assert metrics == {
        "kl/reference": pytest.approx(1.1),
        "kl/answer": pytest.approx(2.2),
        "kl/penalty_weight": 0.1,
    }
    # The step that the KL was measured in has the weight of before.
    assert rows["token_penalties"].tolist() == [pytest.approx([0, 0.1, 0.1]), pytest.approx([0, 0.12, 0.12])]
    assert penalize.controller.weight == pytest.approx(0.1 * (1 + 0.1 * 2 / 100))
    # 10 nats are held at 20 % above.
    assert penalize(answers(10.0))["kl/penalty_weight"] == pytest.approx(0.1002)
    assert penalize.controller.weight == pytest.approx(0.1002 * 1.002)
    # Below 0, as k1 may be, is held at 20 % below.
    penalize(answers(-3.0, -5.0, 1.0, 0.0, 0.5))
    assert penalize.controller.weight == pytest.approx(0.1002 * 1.002 * 0.99)


def test_answers_without_trained_tokens_do_not_change_the_kl_weight():
    penalize = kl_in_reward(adaptive())
    assert penalize(answers(2.2, 50.0, trained=[1, 0]))["kl/answer"] == pytest.approx(2.2)
    weight = penalize.controller.weight
    assert weight == pytest.approx(0.1 * (1 + 0.1 / 100))
    metrics = penalize(answers(9.0, trained=[0]))
    assert metrics == {"kl/reference": 0.0, "kl/penalty_weight": weight}
    assert penalize.controller.weight == weight


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 499)), min_size=1, max_size=30),
    st.floats(0.01, 20),
    st.floats(1e-6, 10),
)
def test_the_kl_weight_stays_positive_and_follows_the_kl_in_bounded_steps(steps, target, weight):
    controller = AdaptiveKLController(AdaptiveKLConfig(target=target, horizon=100), weight=weight)
    for kl, count in steps:
        before = controller.weight
        controller.update(kl, answers=count)
        assert 0 < controller.weight < math.inf
        moved = controller.weight / before - 1
        # Rounding of the two products.
        assert abs(moved) <= 0.2 * count / 100 * (1 + 1e-9) + 1e-12
        assert (moved > 0) == (kl > target) or abs(moved) < 1e-12


def test_adaptive_kl_weight_converges_to_the_target_kl():
    # A policy whose KL halves if the weight doubles.
    controller = AdaptiveKLController(AdaptiveKLConfig(target=3.0, horizon=10_000), weight=0.01)
    for _ in range(400):
        controller.update(0.6 / controller.weight, answers=1000)
    assert 0.6 / controller.weight == pytest.approx(3.0, rel=1e-6)


def test_the_kl_weight_is_restored_bit_for_bit():
    def after(controller, kls):
        for kl in kls:
            controller.update(kl, answers=7)
        return controller

    config = AdaptiveKLConfig(target=0.3, horizon=1000)
    stopped = after(AdaptiveKLController(config, weight=0.07), [0.1, 0.29, 0.5])
    resumed = AdaptiveKLController(config, weight=0.07)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert after(resumed, [0.31, 0.2]).weight == after(stopped, [0.31, 0.2]).weight


def test_a_first_weight_that_changed_since_the_checkpoint_applies():
    config = AdaptiveKLConfig(target=0.3, horizon=1000)
    stopped = AdaptiveKLController(config, weight=0.07)
    stopped.update(0.9, answers=7)
    resumed = AdaptiveKLController(config, weight=0.2)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.weight == 0.2


def test_invalid_adaptive_kl_settings_are_errors():
    with pytest.raises(ValidationError, match="set use_kl_in_reward"):
        ClippedPGLossConfig(reference_policy_kl_penalty=0.1, adaptive_kl={"target": 6.0})
    with pytest.raises(ValidationError, match="greater than 0"):
        AdaptiveKLConfig(target=0.0)

    def conflicts(horizon):
        config = GRPOConfig(num_prompts_per_step=64, num_generations_per_prompt=8)
        policy = PolicyConfig(backend="x", model_name="x")
        loss_fn = adaptive(horizon=horizon)
        run = RunConfig(algorithm_name="grpo", algorithm=config, loss_fn=loss_fn, policy=policy, data=DataConfig())
        return [(path, message) for path, message in config.conflicts(run) if path[0] == "loss_fn"]

    # 512 answers and a fifth of them: 102.4.
    [(path, message)] = conflicts(102)
    assert path == ("loss_fn", "adaptive_kl", "horizon")
    assert "would reduce the weight by 100%" in message
    assert conflicts(103) == []
