"""Losses compared with an independent float64 loop over tokens, and their mathematical properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses import ClippedPGLossConfig, ClippedPGLossFn, GRPOLossFn, NLLLossFn
from rl_train.algorithms.losses.config import CISPOLossConfig, DAPOLossConfig, DrGRPOLossConfig, GRPOLossConfig, GSPOLossConfig


def random_batch(seed, rows=4, length=6):
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=rng)

    logprobs = -3 * draw(rows, length)
    data = BatchedDataDict(
        {
            "token_mask": (draw(rows, length) > 0.3).float(),
            "sample_mask": (draw(rows) > 0.2).float(),
            "advantages": 4 * draw(rows, length) - 2,
            "prev_logprobs": logprobs + 0.8 * (draw(rows, length) - 0.5),
            "generation_logprobs": logprobs + 0.8 * (draw(rows, length) - 0.5),
            "reference_policy_logprobs": logprobs + 2 * (draw(rows, length) - 0.5),
        }
    )
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    return logprobs, data, data["sample_mask"].sum(), mask.sum()


def weight_by_loop(differences, t, config):
    """The mismatch weight of token t of a row with the given log-probability differences."""
    if not config.use_importance_sampling_correction:
        return 1.0
    low, high = config.truncated_importance_sampling_ratio_min or 0.0, config.truncated_importance_sampling_ratio
    weight, kind = math.exp(differences[t]), config.truncated_importance_sampling_type
    if kind == "tis":
        return max(low, min(high, weight))
    judged = weight if kind == "icepop" else math.exp(sum(differences) / len(differences))
    return weight if low <= judged <= high else 0.0


def token_by_loop(now, ratio, advantage, config):
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    if config.disable_ppo_ratio:
        return -advantage * now
    if config.use_cispo:
        return -advantage * min(max(ratio, low), high) * now
    value = -min(advantage * ratio, advantage * min(max(ratio, low), high))
    if config.ratio_clip_c is not None and advantage < 0:
        value = min(value, -advantage * config.ratio_clip_c)
    return value


def clipped_pg_by_loop(logprobs, data, config):
    """The loss token by token in Python floats; the normalization count is computed here too."""
    rows = []
    for b in range(logprobs.shape[0]):
        trained = [t for t in range(logprobs.shape[1]) if data["token_mask"][b, t] * data["sample_mask"][b] > 0]
        now = [float(logprobs[b, t]) for t in trained]
        before = [float(data["prev_logprobs"][b, t]) for t in trained]
        said = [float(data["generation_logprobs"][b, t]) for t in trained]
        compared = said if config.ratio_to == "sampler" else before
        log_ratios = [x - y for x, y in zip(now, compared, strict=True)]
        differences = [x - y for x, y in zip(before, said, strict=True)]
        tokens = []
        for t, place in enumerate(trained):
            ratio = math.exp(log_ratios[t])
            if config.sequence_level_importance_ratios:
                ratio = math.exp(sum(log_ratios) / len(log_ratios))
            value = token_by_loop(now[t], ratio, float(data["advantages"][b, place]), config)
            value *= weight_by_loop(differences, t, config)
            if config.reference_policy_kl_penalty and not config.use_kl_in_reward:
                r = float(data["reference_policy_logprobs"][b, place]) - now[t]
                value += config.reference_policy_kl_penalty * (math.exp(r) - 1 - r)
            tokens.append(value)
        if float(data["sample_mask"][b]) > 0:
            rows.append(tokens)
    if config.token_level_loss:
        return sum(sum(tokens) for tokens in rows) / max(sum(len(tokens) for tokens in rows), 1)
    lengths = [config.constant_length_normalizer or max(len(tokens), 1) for tokens in rows]
    return sum(sum(tokens) / length for tokens, length in zip(rows, lengths, strict=True)) / max(len(rows), 1)


BOUNDS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.1,
    "truncated_importance_sampling_ratio_min": 0.95,
}
CONFIGS = {
    "ppo": ClippedPGLossConfig(),
    "clip-higher": ClippedPGLossConfig(ratio_clip_min=0.1, ratio_clip_max=0.28),
    "dual-clip": ClippedPGLossConfig(ratio_clip_c=1.2),
    "reinforce": ClippedPGLossConfig(disable_ppo_ratio=True),
    "kl": ClippedPGLossConfig(reference_policy_kl_penalty=0.1),
    "kl in reward": ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True),
    "sequence": ClippedPGLossConfig(token_level_loss=False, reference_policy_kl_penalty=0.04),
    "tis": ClippedPGLossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1.1),
    "tis of two bounds": ClippedPGLossConfig(**BOUNDS),
    "icepop": ClippedPGLossConfig(**BOUNDS, truncated_importance_sampling_type="icepop"),
    "sequence mask": ClippedPGLossConfig(**BOUNDS, truncated_importance_sampling_type="seq-mask-tis"),
    "grpo": GRPOLossConfig(),
    "dapo": DAPOLossConfig(),
    "dr-grpo": DrGRPOLossConfig(constant_length_normalizer=9),
    "gspo": GSPOLossConfig(ratio_clip_min=0.02, ratio_clip_max=0.04),
    "gspo with all": GSPOLossConfig(
        ratio_clip_min=0.02,
        ratio_clip_max=0.04,
        ratio_clip_c=1.05,
        constant_length_normalizer=9,
        reference_policy_kl_penalty=0.1,
        **BOUNDS,
    ),
    "cispo": CISPOLossConfig(ratio_clip_min=0.1, ratio_clip_max=0.1),
    "to the sampler": ClippedPGLossConfig(ratio_to="sampler", ratio_clip_c=1.2, reference_policy_kl_penalty=0.1),
    "gspo to the sampler": GSPOLossConfig(ratio_to="sampler", ratio_clip_min=0.02, ratio_clip_max=0.04),
    "cispo to the sampler": CISPOLossConfig(ratio_to="sampler", ratio_clip_min=0.1, ratio_clip_max=0.1),
    "cispo with icepop": CISPOLossConfig(**BOUNDS, truncated_importance_sampling_type="icepop"),
}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_clipped_loss_equals_a_loop_over_tokens(name, seed):
    logprobs, data, seqs, toks = random_batch(seed)
    loss, _ = ClippedPGLossFn(CONFIGS[name])(logprobs.double(), data, seqs, toks)
    # The batch is float32 (24 bits) and exponentials amplify a little: 1e-5 is far from any wrong formula.
    assert float(loss) == pytest.approx(clipped_pg_by_loop(logprobs.double(), data, CONFIGS[name]), rel=1e-5, abs=1e-6)


def test_on_policy_the_gradient_is_that_of_advantage_times_log_probability():
    logprobs, data, seqs, toks = random_batch(3)
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    for config in (ClippedPGLossConfig(), CISPOLossConfig()):
        loss_fn = ClippedPGLossFn(config)
        loss_fn.on_policy = True
        assert "prev_logprobs" not in loss_fn.required_keys
        x = logprobs.clone().requires_grad_()
        loss, metrics = loss_fn(x, data, seqs, toks)
        loss.backward()
        assert torch.allclose(x.grad, -data["advantages"] * mask / toks, atol=1e-7)
        assert float(metrics["ratio/max"]) == 1.0


def one_row(*, now, before, advantage, said=None):
    now, before = torch.tensor([now]), torch.tensor([before])
    data = BatchedDataDict(
        {
            "token_mask": torch.ones_like(now),
            "sample_mask": torch.ones(1),
            "advantages": torch.full_like(now, advantage),
            "prev_logprobs": before,
            "generation_logprobs": before if said is None else torch.tensor([said]),
        }
    )
    return now, data, torch.tensor(1.0), torch.tensor(float(now.numel()))


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_the_ratio_to_the_sampler_is_that_of_the_loop_and_needs_no_scores(seed, on_policy):
    logprobs, data, seqs, toks = random_batch(seed, rows=3, length=4)
    loss_fn = ClippedPGLossFn(CONFIGS["to the sampler"])
    loss_fn.on_policy = on_policy
    without = BatchedDataDict({key: column for key, column in data.items() if key != "prev_logprobs"})
    assert loss_fn.required_keys <= set(without)
    x = logprobs.double().requires_grad_()
    loss_fn(x, without, seqs, toks)[0].backward()
    # Central differences of 1e-5 in float64 are good to about 1e-9; the batch itself is float32, exact in both.
    for at in range(x.numel()):
        step = torch.zeros_like(x).flatten().index_fill(0, torch.tensor(at), 1e-5).view_as(x)
        above, below = (clipped_pg_by_loop(x.detach() + sign * step, data, loss_fn.config) for sign in (1, -1))
        assert float(x.grad.flatten()[at]) == pytest.approx((above - below) / 2e-5, abs=1e-6)


def test_the_ratio_to_the_sampler_clips_a_token_that_older_weights_sampled_by_hand():
    # The sampler gave e^-1.4, the policy before the step e^-1.0: the ratio of e^0.4 is clipped to 1.2, that to the policy is 1.
    row = one_row(now=[-1.0], before=[-1.0], said=[-1.4], advantage=2.0)
    loss, metrics = ClippedPGLossFn(ClippedPGLossConfig(ratio_to="sampler"))(*row)
    assert float(loss) == pytest.approx(-2.4)
    assert float(metrics["ratio/mean"]) == pytest.approx(math.exp(0.4))
    assert float(ClippedPGLossFn()(*row)[0]) == pytest.approx(-2.0)


@pytest.mark.parametrize("ratio_to", ["policy", "sampler"])
def test_mismatch_covers_tokens_of_the_current_weights_and_staleness_the_others(ratio_to):
    data, seqs, toks = random_batch(3, rows=6)[1:]
    logprobs, sampled = data["prev_logprobs"], data["generation_logprobs"]
    trained = data["token_mask"] * data["sample_mask"].unsqueeze(-1) > 0
    data["stale_mask"] = (torch.arange(6) % 3 == 0).float().expand(6, 6).contiguous()
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(ratio_to=ratio_to))
    loss_fn.on_policy = True
    assert loss_fn.optional_keys == {"stale_mask"}
    shares = [loss_fn(logprobs[i : i + 2], data.slice(i, i + 2), seqs, toks)[1] for i in range(0, 6, 2)]
    whole = {
        name: float({"max": max}.get(loss_fn.metric_reductions.get(name), sum)(share[name] for share in shares))
        for name in shares[0]
    }
    found = loss_fn.reported_metrics(whole)
    d = (logprobs - sampled).double()
    current, stale = d[trained & (data["stale_mask"] == 0)], d[trained & (data["stale_mask"] > 0)]
    assert len(current)
    assert len(stale)
    # k3 of the sampler to the policy; float32 metrics.
    assert found["mismatch/kl"] == pytest.approx(float((current.exp() - 1 - current).mean()), rel=1e-5)
    assert found["staleness/kl"] == pytest.approx(float((stale.exp() - 1 - stale).mean()), rel=1e-5)
    assert found["mismatch/mult_prob_error"] == pytest.approx(float(current.abs().exp().mean()), rel=1e-5)
    assert found["mismatch/max"] == pytest.approx(float(current.abs().max()))
    assert found["staleness/token_frac"] == pytest.approx(len(stale) / len(d[trained]))


def test_a_mean_over_no_token_is_left_out():
    row = one_row(now=[-1.0, -2.0], before=[-1.0, -2.0], said=[-1.5, -1.5], advantage=1.0)
    row[1]["stale_mask"] = torch.ones(1, 2)
    loss_fn = ClippedPGLossFn()
    loss_fn.on_policy = True
    found = loss_fn.reported_metrics({name: float(value) for name, value in loss_fn(*row)[1].items()})
    assert {name for name in found if name.startswith(("mismatch/", "staleness/"))} == {"staleness/kl", "staleness/token_frac"}
    assert loss_fn.reported_metrics({"mismatch/kl": 0.5}) == {"mismatch/kl": 0.5}


def test_clip_higher_by_hand():
    # ratio e^0.4 = 1.4918 is clipped to 1.28 if the advantage is 2, and not clipped if it is -2
    loss, metrics = ClippedPGLossFn(DAPOLossConfig())(*one_row(now=[-1.0], before=[-1.4], advantage=2.0))
    assert float(loss) == pytest.approx(-2.56)
    assert float(metrics["ratio/clipped_frac"]) == 1.0
    loss, _ = ClippedPGLossFn(DAPOLossConfig())(*one_row(now=[-1.0], before=[-1.4], advantage=-2.0))
    assert float(loss) == pytest.approx(2 * math.exp(0.4))


def test_gspo_by_hand():
    # log-ratios 0.3 and -0.1: the sequence's ratio is e^0.1 at both tokens; each token's gradient is -A e^0.1 / 2
    config = GSPOLossConfig(ratio_clip_min=0.2, ratio_clip_max=0.2)
    now, data, seqs, toks = one_row(now=[-1.0, -2.0], before=[-1.3, -1.9], advantage=3.0)
    x = now.clone().requires_grad_()
    loss, _ = ClippedPGLossFn(config)(x, data, seqs, toks)
    loss.backward()
    assert loss.item() == pytest.approx(-3 * math.exp(0.1), rel=1e-6)
    assert x.grad.tolist()[0] == pytest.approx([-1.5 * math.exp(0.1)] * 2, rel=1e-6)


def test_cispo_keeps_the_gradient_of_a_token_whose_ratio_is_out_of_bounds():
    config = CISPOLossConfig(ratio_clip_max=0.2)
    now, data, seqs, toks = one_row(now=[-1.0], before=[-2.0], advantage=2.0)
    gradients = {}
    for name, each in {"cispo": config, "ppo": ClippedPGLossConfig()}.items():
        x = now.clone().requires_grad_()
        ClippedPGLossFn(each)(x, data, seqs, toks)[0].backward()
        gradients[name] = float(x.grad)
    assert gradients == {"cispo": pytest.approx(-2.4), "ppo": 0.0}


def test_dr_grpo_weighs_a_token_the_same_in_a_short_and_in_a_long_answer():
    rng = torch.Generator().manual_seed(0)
    data = BatchedDataDict(
        {
            "token_mask": torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]]),
            "sample_mask": torch.ones(2),
            "advantages": torch.ones(2, 4),
            "prev_logprobs": torch.zeros(2, 4),
            "generation_logprobs": torch.zeros(2, 4),
        }
    )
    x = -torch.rand(2, 4, generator=rng)
    x.requires_grad_()
    config = DrGRPOLossConfig(constant_length_normalizer=8, disable_ppo_ratio=True)
    ClippedPGLossFn(config)(x, data, torch.tensor(2.0), torch.tensor(5.0))[0].backward()
    assert x.grad[data["token_mask"] > 0].tolist() == pytest.approx([-1 / 16] * 5)


@pytest.mark.parametrize(
    ("kind", "weights", "name", "share"),
    [
        ("tis", [0.5, 1.25, 2.0], "mismatch/truncated_frac", 2 / 3),
        ("icepop", [0.0, 1.25, 0.0], "mismatch/masked_frac", 2 / 3),
        ("seq-mask-tis", [0.25, 1.25, 4.0], "mismatch/masked_frac", 0.0),
    ],
)
def test_corrections_by_hand(kind, weights, name, share):
    # The trainer finds the tokens 0.25, 1.25 and 4 times as likely as the sampler; the geometric mean is 1.25^(1/3).
    before = [-3.0, -3.0, -3.0]
    said = [x - math.log(w) for x, w in zip(before, [0.25, 1.25, 4.0], strict=True)]
    config = ClippedPGLossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=2.0,
        truncated_importance_sampling_ratio_min=0.5,
    )
    loss, metrics = ClippedPGLossFn(config)(*one_row(now=before, before=before, said=said, advantage=1.0))
    assert float(loss) == pytest.approx(-sum(weights) / 3, rel=1e-6)
    assert float(metrics["mismatch/weight_mean"]) == pytest.approx(sum(weights) / 3, rel=1e-6)
    assert float(metrics[name]) == pytest.approx(share)


def test_a_sequence_with_a_large_sampler_mismatch_is_dropped_entirely():
    config = ClippedPGLossConfig(**BOUNDS, truncated_importance_sampling_type="seq-mask-tis")
    loss, metrics = ClippedPGLossFn(config)(*one_row(now=[-1.0, -1.0], before=[-1.0, -1.0], said=[-1.0, -1.5], advantage=1.0))
    assert float(loss) == 0.0
    assert float(metrics["mismatch/masked_frac"]) == 1.0


def test_mismatch_metrics_are_zero_and_one_when_sampler_and_policy_agree():
    logprobs, data, seqs, toks = random_batch(5)
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    for config in (CONFIGS["ppo"], CONFIGS["tis of two bounds"], CONFIGS["icepop"], CONFIGS["sequence mask"]):
        _, metrics = ClippedPGLossFn(config)(logprobs, data, seqs, toks)
        assert float(metrics["mismatch/kl"]) == 0.0
        assert float(metrics["mismatch/mult_prob_error"]) == pytest.approx(1.0)
        bounded = [float(value) for name, value in metrics.items() if name.endswith(("masked_frac", "truncated_frac"))]
        assert not any(bounded)


def test_the_grpo_loss_has_the_papers_penalty_and_mean():
    loss_fn = GRPOLossFn()
    assert loss_fn.config.reference_policy_kl_penalty == 0.04
    assert not loss_fn.config.token_level_loss
    assert "reference_policy_logprobs" in loss_fn.required_keys
    assert "reference_policy_logprobs" not in ClippedPGLossFn(CONFIGS["kl in reward"]).required_keys


def test_nll_is_the_mean_over_trained_tokens_by_hand():
    logprobs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, -8.0]])
    data = BatchedDataDict({"token_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]]), "sample_mask": torch.ones(2)})
    loss, metrics = NLLLossFn()(logprobs, data, torch.tensor(2.0), torch.tensor(3.0))
    assert float(loss) == pytest.approx(7 / 3)
    assert float(metrics["loss/nll"]) == pytest.approx(7 / 3)


@pytest.mark.parametrize("name", ["sequence", "gspo with all", "dr-grpo", "sequence mask"])
def test_a_batch_without_trained_tokens_has_no_loss_and_no_nan(name):
    logprobs, data, _, _ = random_batch(2)
    data["token_mask"] = torch.zeros_like(data["token_mask"])
    loss, metrics = ClippedPGLossFn(CONFIGS[name])(logprobs, data, torch.tensor(0.0), torch.tensor(0.0))
    assert float(loss) == 0.0
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e6])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_huge_log_ratio_gives_finite_losses_gradients_and_metrics(name, log_ratio, advantage):
    data = BatchedDataDict(
        {
            "token_mask": torch.tensor([[0.0, 1.0, 1.0]]),
            "sample_mask": torch.ones(1),
            "advantages": torch.full((1, 3), advantage),
            # As far from the trainer as the sampler and the reference policy are, in either direction.
            "prev_logprobs": torch.tensor([[0.0, -1.0 - log_ratio, -1.0]]),
            "generation_logprobs": torch.tensor([[0.0, -1.0, -1.0 - log_ratio]]),
            "reference_policy_logprobs": torch.tensor([[0.0, -1.0 + log_ratio, -1.0]]),
        }
    )
    logprobs = torch.tensor([[0.0, -1.0, -1.0]], requires_grad=True)
    loss, metrics = ClippedPGLossFn(CONFIGS[name])(logprobs, data, torch.tensor(1.0), torch.tensor(2.0))
    loss.backward()
    assert math.isfinite(float(loss))
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(float(value)) for value in metrics.values()), metrics


def test_log_ratios_are_clamped_to_20_nats():
    data = random_batch(3)[1]
    data["token_mask"], data["sample_mask"] = torch.ones(4, 6), torch.ones(4)
    counts = (torch.tensor(4.0), torch.tensor(24.0))
    _, metrics = ClippedPGLossFn()(data["prev_logprobs"] + 30.0, data, *counts)
    assert float(metrics["ratio/max"]) == pytest.approx(math.exp(20.0))
    _, metrics = ClippedPGLossFn()(data["prev_logprobs"] - 30.0, data, *counts)
    assert float(metrics["ratio/min"]) == pytest.approx(math.exp(-20.0))


REFUSED = {
    "k2 in the reward": (
        {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2", "use_kl_in_reward": True},
        "k2 in the reward .* has a wrong gradient",
    ),
    "k3 in the reward": (
        {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k3", "use_kl_in_reward": True},
        "k3 in the reward .* has a wrong gradient",
    ),
    "k1 in the loss": ({"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"}, "expected gradient of zero"),
    "REINFORCE with a dual clip": ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "the ratio that ratio_clip_c needs"),
    "REINFORCE with CISPO": ({"disable_ppo_ratio": True, "use_cispo": True}, "the ratio that use_cispo needs"),
    "CISPO with a dual clip": ({"use_cispo": True, "ratio_clip_c": 3.0}, "would have no effect"),
    "CISPO with sequence ratios": (
        {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
        "remove one of them",
    ),
    "GSPO with a mean over tokens": ({"sequence_level_importance_ratios": True}, "token_level_loss to false"),
    "a constant length with a mean over tokens": ({"constant_length_normalizer": 8}, "token_level_loss to false"),
    "REINFORCE with a ratio to the sampler": ({"disable_ppo_ratio": True, "ratio_to": "sampler"}, "ratio_to would have no"),
    "two corrections": ({"use_importance_sampling_correction": True, "ratio_to": "sampler"}, "a second time"),
    "a penalty of nothing": ({"use_kl_in_reward": True}, "reference_policy_kl_penalty is 0"),
    "bounds without a correction": ({"truncated_importance_sampling_type": "icepop"}, "has no effect without"),
    "bounds that cross": ({**BOUNDS, "truncated_importance_sampling_ratio_min": 1.5}, "must be below"),
    "IcePop with one bound": (
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"},
        "ratio_min",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_each_other_are_refused_with_the_reason(case):
    fields, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        ClippedPGLossConfig(**fields)


def test_the_default_estimator_is_k3_in_the_loss_and_k1_in_the_reward():
    assert ClippedPGLossConfig(reference_policy_kl_penalty=0.1).kl_estimator == "k3"
    assert ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True).kl_estimator == "k1"


def test_k1_in_the_reward_is_accepted():
    config = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1", use_kl_in_reward=True)
    assert not ClippedPGLossFn(config).has_kl_penalty
