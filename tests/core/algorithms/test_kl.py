"""KL estimators against the exact divergence of small distributions."""

import pytest
import torch

from rl_core.algorithms.kl import calculate_kl

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


def test_the_gradient_of_k2_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    # E_p[k2]'s gradient, with the sampling distribution held fixed as a sampler holds it.
    (logp.exp().detach() * calculate_kl(logp, Q.log(), "k2")).sum().backward()
    found = logits.grad.clone()
    logits.grad = None
    logp = logits.log_softmax(-1)
    (logp.exp() * (logp - Q.log())).sum().backward()
    assert torch.allclose(found, logits.grad, atol=1e-12)


def test_clamps_hold_one_wild_token_down():
    wild = calculate_kl(torch.tensor(-50.0), torch.tensor(0.0), "k3", input_clamp_value=20.0, output_clamp_value=10.0)
    assert wild.item() == 10.0
