"""KL estimators compared with the exact divergence of small distributions."""

import math

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.config import ClippedPGLossConfig
from rl_train.algorithms.losses.kl import calculate_kl
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.rewards import kl_in_reward

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_the_unbiased_estimators_have_the_divergence_as_their_mean(kl_type):
    estimate = (P * calculate_kl(P.log(), Q.log(), kl_type)).sum()
    assert estimate.item() == pytest.approx((P * (P / Q).log()).sum().item(), abs=1e-12)


def test_k2_is_half_the_squared_log_ratio():
    assert calculate_kl(torch.tensor(-1.0), torch.tensor(-1.5), "k2").item() == pytest.approx(0.125)


@pytest.mark.parametrize("kl_type", ["k2", "k3"])
def test_k2_and_k3_are_never_negative_and_zero_between_equals(kl_type):
    p, q = torch.randn(1000), torch.randn(1000)
    assert calculate_kl(p, q, kl_type).min() >= 0
    assert calculate_kl(p, p, kl_type).abs().max() == 0


def kl(p, q):
    """KL(p || q) of distributions given by their log-probabilities."""
    return (p.exp() * (p - q)).sum()


def penalty_in_loss(kl_type):
    """The expected term of the KL option in the loss, over all tokens that the policy can sample."""

    def expected(logprobs, reference):
        config = ClippedPGLossConfig(
            reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type, kl_output_clamp_value=None
        )
        loss_fn = ClippedPGLossFn(config)
        loss_fn.on_policy = True
        one = torch.ones(1, dtype=torch.float64)

        def row(token):
            columns = {"advantages": 0 * one, "generation_logprobs": logprobs[token].detach() * one}
            data = {"token_mask": one, "reference_policy_logprobs": reference[token] * one}
            rows = {key: column.unsqueeze(0) for key, column in (columns | data).items()}
            return loss_fn(logprobs[token].view(1, 1), BatchedDataDict({**rows, "sample_mask": one}), one[0], one[0])[0]

        return sum(logprobs[token].exp().detach() * row(token) for token in range(len(logprobs)))

    return expected


def penalty_in_reward(logprobs, reference):
    """The policy gradient of a reward that has the KL option as a cost."""
    return (logprobs.exp().detach() * cost_of_a_run(logprobs.detach(), reference) * logprobs).sum()


def entropy_bonus(logprobs, reference):
    """The expected gradient of `-log p` of sampled tokens."""
    return (logprobs.exp().detach() * -logprobs).sum()


KL_OPTIONS = {
    "k3 in the loss, the default: KL(reference, policy)": (penalty_in_loss(None), lambda p, q: kl(q, p)),
    "k2 in the loss: KL(policy, reference)": (penalty_in_loss("k2"), kl),
    "k1 in the reward, the default: KL(policy, reference)": (penalty_in_reward, kl),
    "-log p of sampled tokens: nothing": (entropy_bonus, lambda p, q: 0.0 * p.sum()),
}


@pytest.mark.parametrize("option", KL_OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_each_kl_option_has_the_gradient_of_the_divergence_that_the_documentation_names(option, seed):
    penalty, divergence = KL_OPTIONS[option]
    generator = torch.Generator().manual_seed(seed)
    reference, theta = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    theta.requires_grad_()

    def gradient(term):
        return torch.autograd.grad(term(theta.log_softmax(0), reference.log_softmax(0)), theta)[0]

    # Sums of 6 float64 terms.
    torch.testing.assert_close(gradient(penalty), gradient(divergence), rtol=0.0, atol=1e-12)
    # The gradients of the two divergences differ, so the comparison tells them apart.
    assert float((gradient(kl) - gradient(lambda p, q: kl(q, p))).norm()) > 0.01


@pytest.mark.parametrize(("lost", "has_gradient"), [(2.0, True), (2.6, True), (2.7, False)])
def test_the_default_clamp_of_k3_removes_the_gradient_of_tokens_that_lost_more_than_2_6_nats(lost, has_gradient):
    logprob = torch.tensor(-1.0 - lost, requires_grad=True)
    config = ClippedPGLossConfig()
    bounds = {"input_clamp_value": config.kl_input_clamp_value, "output_clamp_value": config.kl_output_clamp_value}
    calculate_kl(logprob, torch.tensor(-1.0), "k3", **bounds).backward()
    assert logprob.grad.item() == pytest.approx(1.0 - math.exp(lost) if has_gradient else 0.0)


def test_clamps_limit_outlier_tokens():
    wild = calculate_kl(torch.tensor(-50.0), torch.tensor(0.0), "k3", input_clamp_value=20.0, output_clamp_value=10.0)
    assert wild.item() == 10.0


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_estimates_of_a_huge_log_ratio_are_finite_without_any_clamp_of_the_config(kl_type, log_ratio):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = calculate_kl(logprobs, torch.tensor([log_ratio - 1.0]), kl_type)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(logprobs.grad).all()


def exact_kl(theta, reference):
    """KL(p || q) of two categorical distributions by their logits, in closed form."""
    p = (theta - theta.max()).exp() / (theta - theta.max()).exp().sum()
    q = (reference - reference.max()).exp() / (reference - reference.max()).exp().sum()
    return (p * (p / q).log()).sum()


def two_policies():
    """Logits of a policy and of its reference, 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    theta, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64) * 0.6
    return theta.requires_grad_(), reference


def reward_gradient(theta, reference, penalty_of):
    """The exact policy gradient of a reward of -penalty: the sum over all tokens of p sg(penalty) d log p."""
    logprobs = theta.log_softmax(-1)
    penalty = penalty_of(logprobs.detach(), reference.log_softmax(-1))
    (logprobs.detach().exp() * penalty * logprobs).sum().backward()
    found, theta.grad = theta.grad, None
    return found


def cost_of_a_run(logprobs, reference):
    """The penalty per token of a run with only `use_kl_in_reward` set."""
    batch = BatchedDataDict(
        {
            "token_mask": torch.ones(1, len(logprobs)),
            "prev_logprobs": logprobs.unsqueeze(0),
            "reference_policy_logprobs": reference.unsqueeze(0),
        }
    )
    kl_in_reward(ClippedPGLossConfig(reference_policy_kl_penalty=1.0, use_kl_in_reward=True))(batch)
    return batch["token_penalties"][0]


def test_the_default_kl_in_the_reward_has_the_gradient_of_the_kl_and_following_it_takes_the_kl_to_zero():
    theta, reference = two_policies()
    found = reward_gradient(theta, reference, cost_of_a_run)
    exact_kl(theta, reference).backward()
    # Both sides are float64 sums of 50 terms.
    assert torch.allclose(found, theta.grad, atol=1e-12)
    theta.grad = None
    before = exact_kl(theta, reference).item()
    for _ in range(400):
        step = reward_gradient(theta, reference, cost_of_a_run)
        with torch.no_grad():
            theta -= 5.0 * step
    assert before > 0.2
    assert exact_kl(theta, reference).item() < 1e-3


@pytest.mark.parametrize("kl_type", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_raise_the_kl_which_is_why_they_are_refused(kl_type):
    theta, reference = two_policies()
    before = exact_kl(theta, reference).item()
    for _ in range(400):
        step = reward_gradient(theta, reference, lambda p, q: calculate_kl(p, q, kl_type))
        with torch.no_grad():
            theta -= 5.0 * step
    assert exact_kl(theta, reference).item() > before
