"""Policy-gradient losses compared with the formulas of their papers, token by token in float64, and their limit cases.

A reference returns, for each token, the term and its derivative by the log-probability of the token, in Python floats. The
derivatives are written out, because some terms have a weight without a gradient.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.plugins import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.algorithms.losses.config import (
    ClipCovLossConfig,
    ClippedPGLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    GSPOLossConfig,
    KLCovLossConfig,
    PolicyGradientLossConfig,
    SAPOLossConfig,
    VESPOLossConfig,
)
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.losses.trust_regions import (
    ClipCovLossFn,
    DPPOLossFn,
    GMPOLossFn,
    GSPOSequenceLossFn,
    KLCovLossFn,
    SAPOLossFn,
    VESPOLossFn,
    binary_kl,
)

WITHIN = 1e-9
"""Both sides are float64 sums of at most 30 terms."""


def random_batch(seed, *, rows=5, length=6, spread=0.4, one_advantage=False):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logprobs = -2.5 * draw(rows, length) - 0.01
    advantages = 4 * draw(rows, 1 if one_advantage else length).expand(rows, length) - 2
    data = BatchedDataDict(
        {
            "input_ids": torch.randint(3, 90, (rows, length), generator=generator),
            "token_mask": (draw(rows, length) > 0.3).double(),
            "sample_mask": (draw(rows) > 0.2).double(),
            "advantages": advantages.contiguous(),
            "prev_logprobs": (logprobs + 2 * spread * (draw(rows, length) - 0.5)).clamp(max=-1e-3),
            "generation_logprobs": (logprobs + 2 * spread * (draw(rows, length) - 0.5)).clamp(max=-1e-3),
        }
    )
    data["token_mask"][0, -1], data["sample_mask"][0] = 1.0, 1.0
    return logprobs, data


def dppo(config, q, p, r, advantage, row):
    moved, (below, above) = p - q, config.divergence_bounds
    divergence = abs(moved)
    if config.divergence == "kl":
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    dropped = (advantage > 0 and moved > 0 and divergence > above) or (advantage < 0 and moved < 0 and divergence > below)
    w = config.log_ratio_penalty
    term = 0.0 if dropped else -advantage * r
    return term + w * math.log(r) ** 2, term + 2 * w * math.log(r)


def sapo(config, q, p, r, advantage, row):
    tau = config.temperature_positive if advantage > 0 else config.temperature_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * r


def gmpo(config, q, p, r, advantage, row):
    def clip(log_ratio, a):
        if a > 0:
            return min(log_ratio, config.log_ratio_clip_max)
        return max(log_ratio, -config.log_ratio_clip_min) if a < 0 else log_ratio

    mean = math.exp(sum(clip(math.log(each), a) for each, a in row) / len(row))
    return -advantage * mean, -advantage * mean * float(clip(math.log(r), advantage) == math.log(r))


def vespo(config, q, p, r, advantage, row):
    w = math.prod(each for each, _ in row)
    if advantage >= 0:
        k, rate = config.k_positive, config.lambda_positive
    else:
        k, rate = config.k_negative, config.lambda_negative
    phi = math.exp(rate) * w**k * math.exp(-rate * w)
    return -phi * advantage * math.log(p), -phi * advantage


def gspo_sequence(config, q, p, r, advantage, row):
    """Each of the n tokens has one n-th of the gradient of the objective min(s A, clip(s) A)."""
    s = math.prod(each for each, _ in row) ** (1 / len(row))
    a = sum(each for _, each in row) / len(row)
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    objective = min(s * a, min(max(s, low), high) * a)
    return -objective, -s * a * float(objective == s * a)


CASES = {
    "dppo of total variation": (DPPOLossFn, DPPOLossConfig(divergence_max_below=0.04, divergence_max_above=0.06), dppo),
    "dppo of kl": (
        DPPOLossFn,
        DPPOLossConfig(divergence="kl", divergence_max_below=0.02, divergence_max_above=0.01, ratio_to="policy"),
        dppo,
    ),
    "dppo of prime-rl": (
        DPPOLossFn,
        DPPOLossConfig(divergence_max_below=0.05, divergence_max_above=0.05, log_ratio_penalty=0.1),
        dppo,
    ),
    "sapo": (SAPOLossFn, SAPOLossConfig(temperature_positive=3.0, temperature_negative=5.0), sapo),
    "gmpo": (GMPOLossFn, GMPOLossConfig(log_ratio_clip_min=0.15, log_ratio_clip_max=0.2), gmpo),
    "vespo": (VESPOLossFn, VESPOLossConfig(), vespo),
    "vespo to the sampler": (VESPOLossFn, VESPOLossConfig(ratio_to="sampler", k_negative=1.0, lambda_positive=0.5), vespo),
    "gspo of sequences": (GSPOSequenceLossFn, GSPOLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.03), gspo_sequence),
}


def by_loop(reference, config, logprobs, data):
    """The loss, its gradient [B, T], and the number of trained tokens and rows, without a single tensor operation."""
    compared = data["generation_logprobs" if config.ratio_to == "sampler" else "prev_logprobs"].tolist()
    now, advantages, masks = logprobs.tolist(), data["advantages"].tolist(), data["token_mask"].tolist()
    kept = [bool(each) for each in data["sample_mask"].tolist()]
    trained = [[t for t, m in enumerate(mask) if m and kept[b]] for b, mask in enumerate(masks)]
    num_rows, num_tokens = sum(kept), sum(map(len, trained))
    loss, gradient = 0.0, [[0.0] * len(row) for row in now]
    for b, positions in enumerate(trained):
        row = [(math.exp(now[b][t] - compared[b][t]), advantages[b][t]) for t in positions]
        for t, (r, a) in zip(positions, row, strict=True):
            term, slope = reference(config, math.exp(compared[b][t]), math.exp(now[b][t]), r, a, row)
            divisor = num_tokens if config.token_level_loss else num_rows * len(positions)
            loss += term / divisor
            gradient[b][t] = slope / divisor
    return loss, torch.tensor(gradient, dtype=torch.float64), float(num_rows), float(num_tokens)


def loss_and_gradient(loss_fn, logprobs, data):
    seqs, toks = data["sample_mask"].sum(), (data["token_mask"] * data["sample_mask"].unsqueeze(-1)).sum()
    x = logprobs.clone().requires_grad_()
    loss, metrics = loss_fn(x, data, seqs, toks)
    loss.backward()
    return loss.detach(), x.grad, metrics


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_value_and_gradient_equal_the_formula_of_the_paper(name, seed):
    kind, config, reference = CASES[name]
    logprobs, data = random_batch(seed)
    loss, gradient, _ = loss_and_gradient(kind(config), logprobs, data)
    expected, expected_gradient, _, _ = by_loop(reference, config, logprobs, data)
    assert float(loss) == pytest.approx(expected, rel=WITHIN, abs=WITHIN)
    torch.testing.assert_close(gradient, expected_gradient, rtol=WITHIN, atol=WITHIN)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("sapo", "vespo"))])
def test_the_bounds_of_the_compared_losses_take_effect_for_some_tokens(name):
    kind, config, _ = CASES[name]
    metrics = loss_and_gradient(kind(config), *random_batch(1, rows=20))[2]
    assert 0.02 < float(metrics["ratio/clipped_frac"]) < 0.9


REGISTRY = Registry(discover())
POLICY_GRADIENTS = {
    name: REGISTRY.find(Kind.LOSS, name)
    for name in REGISTRY.names(Kind.LOSS)
    if issubclass(REGISTRY.find(Kind.LOSS, name).load_config(), PolicyGradientLossConfig)
}
SETTINGS = {
    "grpo": {"reference_policy_kl_penalty": 0.0},
    "dr_grpo": {"constant_length_normalizer": 1},
    "kl_cov": {"kl_cov_penalty": 0.05},
}


def registered(name):
    component = POLICY_GRADIENTS[name]
    return component.load()(component.load_config()(name=name, **SETTINGS.get(name, {})))


def with_columns(loss_fn, data):
    return BatchedDataDict({**data, **loss_fn.batch_columns(data)})


def test_all_losses_of_this_module_are_registered():
    added = {"dppo", "sapo", "gmpo", "vespo", "gspo_sequence", "clip_cov", "kl_cov"}
    assert added <= set(POLICY_GRADIENTS)


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
@pytest.mark.parametrize("behind", [0.0, 0.05])
def test_the_expected_gradient_over_both_tokens_of_a_policy_raises_the_expected_reward(name, behind):
    # Each action is a row of one token. The rows of the sampler are enumerated: 300 of 1000 sample action 0, and so on.
    theta = torch.tensor([0.0, math.log(7 / 3)], dtype=torch.float64)
    sampler = theta.log_softmax(0)
    actions = torch.tensor([0] * 300 + [1] * 700)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    # The current policy has moved by `behind` towards the reward, within the bounds of every loss but GSPO's.
    logits = (theta + torch.tensor([behind, 0.0])).requires_grad_()
    loss_fn = registered(name)
    column = sampler[actions].unsqueeze(1)
    data = BatchedDataDict(
        {
            "input_ids": actions.unsqueeze(1),
            "token_mask": torch.ones(1000, 1, dtype=torch.float64),
            "sample_mask": torch.ones(1000, dtype=torch.float64),
            "advantages": (rewards - 0.3)[actions].unsqueeze(1),
            "prev_logprobs": column,
            "generation_logprobs": column,
        }
    )
    logprobs = logits.log_softmax(0)[actions].unsqueeze(1)
    count = torch.tensor(1000.0, dtype=torch.float64)
    loss_fn(logprobs, with_columns(loss_fn, data), count, count)[0].backward()
    expected_reward = (logits.detach().softmax(0) * rewards).sum()
    of_reward = torch.tensor([expected_reward * (1 - expected_reward), -expected_reward * (1 - expected_reward)])
    if name in ("gspo", "gspo_sequence") and behind:  # exp(0.035) is far beyond its bound of 1.0004, and is clipped
        assert float(-logits.grad @ of_reward.double()) >= 0
    else:
        assert float(-logits.grad @ of_reward.double()) > 0
    if not behind and name != "clip_cov":
        # Without a step, it is exactly the policy gradient: p (1 - p) for the first logit.
        assert float(logits.grad[0]) == pytest.approx(-0.21, rel=1e-9)


@pytest.mark.parametrize("name", sorted({*POLICY_GRADIENTS} - {"dr_grpo", "clip_cov"}))
def test_with_a_ratio_of_1_every_loss_has_the_gradient_of_reinforce(name):
    logprobs, data = random_batch(4, one_advantage=True)
    loss_fn = registered(name)
    data["prev_logprobs"] = data["generation_logprobs"] = logprobs
    gradient = loss_and_gradient(loss_fn, logprobs, with_columns(loss_fn, data))[1]
    reinforce = ClippedPGLossConfig(disable_ppo_ratio=True, token_level_loss=loss_fn.config.token_level_loss)
    expected = loss_and_gradient(ClippedPGLossFn(reinforce), logprobs, data)[1]
    torch.testing.assert_close(gradient, expected, rtol=WITHIN, atol=WITHIN)


def unclipped(**fields):
    return ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_min=1.0, ratio_clip_max=1e9, **fields))


def test_sapo_with_a_low_temperature_has_the_gradient_of_the_unclipped_ratio():
    logprobs, data = random_batch(6)
    low = SAPOLossConfig(temperature_positive=1e-6, temperature_negative=1e-6)
    gradient = loss_and_gradient(SAPOLossFn(low), logprobs, data)[1]
    expected = loss_and_gradient(unclipped(token_level_loss=False), logprobs, data)[1]
    # The error of the sigmoid's linear part is of the order of the squared temperature.
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_without_bounds_is_the_unclipped_ratio(divergence):
    logprobs, data = random_batch(7, spread=2.0)
    config = DPPOLossConfig(divergence=divergence, divergence_max_below=1e9, divergence_max_above=1e9)
    loss, gradient, metrics = loss_and_gradient(DPPOLossFn(config), logprobs, data)
    expected, expected_gradient, _ = loss_and_gradient(unclipped(ratio_to="sampler"), logprobs, data)
    assert float(metrics["ratio/clipped_frac"]) == 0.0
    torch.testing.assert_close((loss, gradient), (expected, expected_gradient), rtol=WITHIN, atol=WITHIN)


def test_dppo_keeps_a_rare_token_whose_ratio_ppo_clips_and_drops_a_likely_one_whose_ratio_it_keeps():
    # From 0.001 to 0.01 the ratio is 10, and from 0.8 to 0.955 it is 1.19.
    now, before = torch.tensor([[0.01, 0.955]]).log().double(), torch.tensor([[0.001, 0.8]]).log().double()
    data = BatchedDataDict(
        {
            "token_mask": torch.ones(1, 2),
            "sample_mask": torch.ones(1),
            "advantages": torch.ones(1, 2),
            "prev_logprobs": before,
            "generation_logprobs": before,
        }
    )
    losses = {"dppo": DPPOLossFn(DPPOLossConfig()), "ppo": ClippedPGLossFn()}
    dropped = {name: loss_and_gradient(loss_fn, now, data)[1] == 0 for name, loss_fn in losses.items()}
    assert dropped["dppo"].tolist() == [[False, True]]
    assert dropped["ppo"].tolist() == [[True, False]]


def test_the_binary_kl_is_finite_and_not_negative_up_to_certain_tokens():
    logs = torch.tensor([0.0, -1e-9, -1e-4, -1.0, -30.0])
    found = binary_kl(logs.unsqueeze(0), logs.unsqueeze(1))
    assert torch.isfinite(found).all()
    assert (found > -1e-6).all()


def test_gmpo_of_single_tokens_is_the_clipped_loss_with_the_same_bounds():
    logprobs, data = random_batch(8, length=1, rows=12)
    gmpo_loss = GMPOLossFn(GMPOLossConfig(log_ratio_clip_min=0.1, log_ratio_clip_max=0.2))
    bounds = {"ratio_clip_min": 1 - math.exp(-0.1), "ratio_clip_max": math.exp(0.2) - 1}
    clipped = ClippedPGLossFn(ClippedPGLossConfig(token_level_loss=False, **bounds))
    ours, expected = (loss_and_gradient(each, logprobs, data) for each in (gmpo_loss, clipped))
    torch.testing.assert_close(ours[:2], expected[:2], rtol=WITHIN, atol=WITHIN)
    assert 0.0 < float(ours[2]["ratio/clipped_frac"]) == float(expected[2]["ratio/clipped_frac"])


def test_gmpo_without_clipping_is_gspo_without_clipping():
    logprobs, data = random_batch(9)
    wide = GMPOLossFn(GMPOLossConfig(log_ratio_clip_min=9.0, log_ratio_clip_max=9.0))
    gspo = unclipped(token_level_loss=False, sequence_level_importance_ratios=True)
    ours, expected = (loss_and_gradient(each, logprobs, data)[:2] for each in (wide, gspo))
    torch.testing.assert_close(ours, expected, rtol=WITHIN, atol=WITHIN)


def test_the_sequence_form_of_gspo_equals_the_token_form_if_a_sequence_has_one_advantage():
    config = GSPOLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.03)
    logprobs, data = random_batch(10, rows=20, one_advantage=True)
    ours, expected = (loss_and_gradient(kind(config), logprobs, data)[:2] for kind in (GSPOSequenceLossFn, ClippedPGLossFn))
    torch.testing.assert_close(ours, expected, rtol=WITHIN, atol=WITHIN)


def test_the_forms_of_gspo_differ_if_the_advantages_of_a_sequence_have_both_signs():
    # The ratio e^0.1 is above the bound of 1.05. The mean advantage is 1, so the sequence form clips both tokens; the token
    # form keeps the token with the negative advantage.
    before = torch.full((1, 2), -1.1, dtype=torch.float64)
    data = BatchedDataDict(
        {
            "token_mask": torch.ones(1, 2, dtype=torch.float64),
            "sample_mask": torch.ones(1, dtype=torch.float64),
            "advantages": torch.tensor([[3.0, -1.0]], dtype=torch.float64),
            "prev_logprobs": before,
            "generation_logprobs": before,
        }
    )
    config = GSPOLossConfig(ratio_clip_min=0.05, ratio_clip_max=0.05)
    of_sequence, of_tokens = (
        loss_and_gradient(kind(config), before + 0.1, data) for kind in (GSPOSequenceLossFn, ClippedPGLossFn)
    )
    assert of_sequence[1].tolist() == [[0.0, 0.0]]
    assert of_tokens[1].tolist()[0] == pytest.approx([0.0, math.exp(0.1) / 2])


def test_vespo_with_k_1_and_lambda_near_0_weights_tokens_by_the_ratio_of_the_sequence():
    logprobs, data = random_batch(11)
    config = VESPOLossConfig(k_positive=1.0, k_negative=1.0, lambda_positive=1e-12, lambda_negative=1e-12)
    gradient = loss_and_gradient(VESPOLossFn(config), logprobs, data)[1]
    trained = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    w = ((logprobs - data["prev_logprobs"]) * trained).sum(1, keepdim=True).exp()
    torch.testing.assert_close(gradient, -w * data["advantages"] * trained / trained.sum(), rtol=1e-9, atol=1e-9)


def test_luspo_is_gspo_with_a_constant_length_of_1():
    # LUSPO, https://arxiv.org/abs/2602.05261: the objective of GSPO, multiplied by the length of the sequence.
    logprobs, data = random_batch(12, one_advantage=True)
    config = GSPOLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.03, constant_length_normalizer=1)
    loss, gradient, _ = loss_and_gradient(ClippedPGLossFn(config), logprobs, data)
    x = logprobs.clone().requires_grad_()
    total = 0.0
    for b in range(len(x)):
        mask = data["token_mask"][b] > 0
        if not data["sample_mask"][b] or not mask.any():
            continue
        s = (x[b] - data["prev_logprobs"][b])[mask].mean().exp()
        a = data["advantages"][b, 0]
        total = total - mask.sum() * torch.minimum(s * a, s.clamp(0.98, 1.03) * a)
    (total / data["sample_mask"].sum()).backward()
    assert float(loss) == pytest.approx(float(total.detach() / data["sample_mask"].sum()), rel=WITHIN)
    torch.testing.assert_close(gradient, x.grad, rtol=WITHIN, atol=WITHIN)


@pytest.mark.parametrize("seed", range(3))
def test_the_importance_sampling_correction_is_decoupled_ppo(seed):
    # https://arxiv.org/abs/2110.00641: (p_prox / p_behav) · min(r A, clip(r) A), with r = p / p_prox. p_prox is the
    # policy before the step, p_behav the sampler; the upper bound of the weights is out of reach here.
    logprobs, data = random_batch(seed)
    config = ClippedPGLossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1e6)
    found = loss_and_gradient(ClippedPGLossFn(config), logprobs, data)

    def decoupled(config, q, p, r, advantage, row):
        behaviour = math.exp(next(behaviours))
        objective = min(r * advantage, min(max(r, 0.8), 1.2) * advantage)
        return -q / behaviour * objective, -q / behaviour * r * advantage * float(objective == r * advantage)

    trained = data["token_mask"] * data["sample_mask"].unsqueeze(-1) > 0
    behaviours = iter(data["generation_logprobs"][trained].tolist())
    expected, gradient, _, _ = by_loop(decoupled, config, logprobs, data)
    assert float(found[0]) == pytest.approx(expected, rel=WITHIN)
    torch.testing.assert_close(found[1], gradient, rtol=WITHIN, atol=WITHIN)


def covariances(data, compared):
    """The covariance of each trained token, by its row and position, by hand."""
    trained = data["token_mask"] * data["sample_mask"].unsqueeze(-1) > 0
    at = [tuple(index) for index in trained.nonzero().tolist()]
    pairs = [(float(data["advantages"][index]), float(data[compared][index])) for index in at]
    mean_a, mean_p = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return {index: (a - mean_a) * (p - mean_p) for index, (a, p) in zip(at, pairs, strict=True)}


@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_cov_penalizes_the_tokens_of_highest_covariance_in_the_step(on_policy):
    logprobs, data = random_batch(13, rows=20)
    loss_fn = KLCovLossFn(KLCovLossConfig(kl_cov_fraction=0.1, kl_cov_penalty=0.7))
    loss_fn.on_policy = on_policy
    found = covariances(data, "generation_logprobs" if on_policy else "prev_logprobs")
    best = sorted(found, key=found.get, reverse=True)[: int(0.1 * len(found))]
    columns = loss_fn.batch_columns(data)
    assert {tuple(index) for index in columns["high_covariance"].nonzero().tolist()} == set(best)
    if on_policy:
        return
    loss, gradient, _ = loss_and_gradient(loss_fn, logprobs, BatchedDataDict({**data, **columns}))
    plain, plain_gradient, _ = loss_and_gradient(unclipped(), logprobs, data)
    added = torch.zeros_like(gradient)
    for index in best:
        added[index] = 0.7 / len(found) * math.copysign(1.0, float(logprobs[index] - data["prev_logprobs"][index]))
    penalty = sum(0.7 * abs(float(logprobs[index] - data["prev_logprobs"][index])) for index in best) / len(found)
    torch.testing.assert_close(gradient, plain_gradient + added, rtol=WITHIN, atol=WITHIN)
    assert float(loss) == pytest.approx(float(plain) + penalty, rel=WITHIN)


def test_clip_cov_removes_the_gradient_of_tokens_within_its_bounds_and_of_no_others():
    logprobs, data = random_batch(14, rows=30)
    config = ClipCovLossConfig(clip_cov_fraction=0.05, clip_cov_min=0.2, clip_cov_max=1.0)
    loss_fn, found = ClipCovLossFn(config), covariances(data, "prev_logprobs")
    columns = loss_fn.batch_columns(data)
    chosen = {tuple(index) for index in columns["high_covariance"].nonzero().tolist()}
    candidates = {index for index, covariance in found.items() if 0.2 < covariance < 1.0}
    assert chosen < candidates
    assert len(chosen) == int(0.05 * len(found))
    _, gradient, _ = loss_and_gradient(loss_fn, logprobs, BatchedDataDict({**data, **columns}))
    whole = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_min=1.0, ratio_clip_max=1.0))
    _, expected, _ = loss_and_gradient(whole, logprobs, data)
    expected = expected * (1 - columns["high_covariance"])
    torch.testing.assert_close(gradient, expected, rtol=WITHIN, atol=WITHIN)
    # The same step draws the same tokens, another step others.
    again = loss_fn.batch_columns(data)["high_covariance"]
    assert torch.equal(again, columns["high_covariance"])
    other = BatchedDataDict({**data, "input_ids": data["input_ids"] + 1})
    assert not torch.equal(loss_fn.batch_columns(other)["high_covariance"], again)


def test_clip_cov_without_a_token_within_its_bounds_is_the_clipped_loss():
    logprobs, data = random_batch(15)
    loss_fn = ClipCovLossFn(ClipCovLossConfig(clip_cov_min=100.0, clip_cov_max=101.0))
    ours = loss_and_gradient(loss_fn, logprobs, with_columns(loss_fn, data))[:2]
    whole = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_min=1.0, ratio_clip_max=1.0))
    torch.testing.assert_close(ours, loss_and_gradient(whole, logprobs, data)[:2], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [KLCovLossFn, ClipCovLossFn])
def test_a_step_without_trained_tokens_selects_none(kind):
    data = random_batch(16)[1]
    data["sample_mask"] = torch.zeros_like(data["sample_mask"])
    config = KLCovLossConfig() if kind is KLCovLossFn else ClipCovLossConfig()
    assert not kind(config).batch_columns(data)["high_covariance"].any()


@pytest.mark.parametrize("name", ["dppo", "sapo", "gmpo", "vespo", "gspo_sequence", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_huge_log_ratio_gives_finite_losses_gradients_and_metrics(name, log_ratio, advantage):
    now = torch.tensor([[0.0, -1.0, -1.0]])
    data = BatchedDataDict(
        {
            "input_ids": torch.ones(1, 3, dtype=torch.long),
            "token_mask": torch.tensor([[0.0, 1.0, 1.0]]),
            "sample_mask": torch.ones(1),
            "advantages": torch.full((1, 3), advantage),
            "prev_logprobs": torch.tensor([[0.0, -1.0 - log_ratio, -1.0]]),
            "generation_logprobs": torch.tensor([[0.0, -1.0 - log_ratio, -1.0]]),
        }
    )
    loss_fn = registered(name)
    loss, gradient, metrics = loss_and_gradient(loss_fn, now, with_columns(loss_fn, data))
    assert math.isfinite(float(loss))
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(float(value)) for value in metrics.values()), metrics


def test_rows_without_advantages_are_only_computed_if_a_term_needs_them():
    data = random_batch(17)[1]
    data["token_mask"], data["sample_mask"] = torch.ones_like(data["token_mask"]), torch.ones_like(data["sample_mask"])
    data["advantages"][2] = 0.0
    for name in ("dppo", "sapo", "gmpo", "vespo", "gspo_sequence", "clip_cov"):
        assert registered(name).rows_with_gradient(data).tolist() == [True, True, False, True, True], name
    assert registered("kl_cov").rows_with_gradient(data) is None
    assert DPPOLossFn(DPPOLossConfig(log_ratio_penalty=0.1)).rows_with_gradient(data) is None

    class WithOtherTerm(SAPOLossFn):
        def _surrogate(self, tokens, ratio):
            loss, clipped = super()._surrogate(tokens, ratio)
            return loss + tokens.logprobs, clipped

    assert WithOtherTerm(SAPOLossConfig()).rows_with_gradient(data) is None


REFUSED = {
    "gmpo with a mean over tokens": (GMPOLossConfig, {"token_level_loss": True}, "token_level_loss to false"),
    "vespo with weights of tokens": (VESPOLossConfig, {"use_importance_sampling_correction": True}, "set ratio_to: sampler"),
    "bounds in the wrong order": (ClipCovLossConfig, {"clip_cov_min": 6.0}, "must be below clip_cov_max"),
    "two corrections": (DPPOLossConfig, {"use_importance_sampling_correction": True}, "a second time"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_contradict_each_other_are_refused(name):
    config, fields, message = REFUSED[name]
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_losses_of_whole_sequences_say_so_for_rollouts_with_segments():
    assert (GMPOLossConfig().sequence_level_key, VESPOLossConfig().sequence_level_key) == ("name", "name")
    assert DPPOLossConfig().sequence_level_key is None
    assert SAPOLossConfig().sequence_level_key == "token_level_loss"
