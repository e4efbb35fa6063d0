"""Losses against a float64 loop over tokens that shares no code, and the laws that they must hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.losses import ClippedPGLossConfig, ClippedPGLossFn, GRPOLossFn, NLLLossFn
from rl_core.data.batched_data_dict import BatchedDataDict


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


def clipped_pg_by_loop(logprobs, data, config):
    per_sequence, all_tokens = [], []
    for b in range(logprobs.shape[0]):
        tokens = []
        for t in range(logprobs.shape[1]):
            if data["token_mask"][b, t] * data["sample_mask"][b] == 0:
                continue
            now, before = float(logprobs[b, t]), float(data["prev_logprobs"][b, t])
            advantage, ratio = float(data["advantages"][b, t]), math.exp(now - before)
            if config.disable_ppo_ratio:
                value = -advantage * now
            else:
                low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
                value = -min(advantage * ratio, advantage * min(max(ratio, low), high))
                if config.ratio_clip_c is not None and advantage < 0:
                    value = min(value, -advantage * config.ratio_clip_c)
            if config.use_importance_sampling_correction:
                value *= min(math.exp(before - float(data["generation_logprobs"][b, t])), config.importance_sampling_max)
            if config.reference_policy_kl_penalty:
                r = float(data["reference_policy_logprobs"][b, t]) - now
                value += config.reference_policy_kl_penalty * (math.exp(r) - 1 - r)
            tokens.append(value)
        if float(data["sample_mask"][b]) > 0:
            per_sequence.append(sum(tokens) / max(len(tokens), 1))
            all_tokens.extend(tokens)
    values = all_tokens if config.token_level_loss else per_sequence
    return sum(values) / max(len(values), 1)


CONFIGS = {
    "ppo": ClippedPGLossConfig(),
    "clip-higher": ClippedPGLossConfig(ratio_clip_min=0.1, ratio_clip_max=0.28),
    "dual-clip": ClippedPGLossConfig(ratio_clip_c=1.2),
    "reinforce": ClippedPGLossConfig(disable_ppo_ratio=True),
    "kl": ClippedPGLossConfig(reference_policy_kl_penalty=0.1),
    "sequence": ClippedPGLossConfig(token_level_loss=False, reference_policy_kl_penalty=0.04),
    "corrected": ClippedPGLossConfig(use_importance_sampling_correction=True, importance_sampling_max=1.1),
}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_clipped_loss_equals_a_loop_over_tokens(name, seed):
    logprobs, data, seqs, toks = random_batch(seed)
    loss, _ = ClippedPGLossFn(CONFIGS[name])(logprobs.double(), data, seqs, toks)
    # The batch is float32 (24 bits) and exponentials amplify a little: 1e-5 is far from any wrong formula.
    assert float(loss) == pytest.approx(clipped_pg_by_loop(logprobs.double(), data, CONFIGS[name]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_microbatches_add_up_to_the_whole_batch(name):
    logprobs, data, seqs, toks = random_batch(7, rows=8)
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    whole, metrics = loss_fn(logprobs, data, seqs, toks)
    parts = [loss_fn(logprobs[i : i + 3], data.slice(i, min(i + 3, 8)), seqs, toks) for i in range(0, 8, 3)]
    assert torch.allclose(sum(part for part, _ in parts), whole, rtol=1e-5, atol=1e-7)
    for key, value in metrics.items():
        how = {"min": min, "max": max}.get(loss_fn.metric_reductions.get(key, ""), sum)
        assert float(how([part[key] for _, part in parts])) == pytest.approx(float(value), rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", CONFIGS)
def test_what_lies_under_the_mask_changes_neither_loss_nor_gradient(name):
    logprobs, data, seqs, toks = random_batch(11)
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1) > 0

    def value_and_gradient(x, batch):
        x = x.clone().requires_grad_()
        loss, _ = ClippedPGLossFn(CONFIGS[name])(x, batch, seqs, toks)
        loss.backward()
        return loss.detach(), x.grad

    loss, grad = value_and_gradient(logprobs, data)
    hidden = BatchedDataDict({key: value.clone() for key, value in data.items()})
    for key in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        hidden[key][~mask] = 37.0
    other_loss, other_grad = value_and_gradient(torch.where(mask, logprobs, torch.tensor(-41.0)), hidden)
    assert torch.equal(loss, other_loss)
    assert torch.equal(grad[mask], other_grad[mask])
    assert (other_grad[~mask] == 0).all()


def test_on_policy_the_gradient_is_that_of_advantage_times_log_probability():
    logprobs, data, seqs, toks = random_batch(3)
    loss_fn = ClippedPGLossFn()
    loss_fn.on_policy = True
    assert "prev_logprobs" not in loss_fn.required_keys
    x = logprobs.clone().requires_grad_()
    loss, metrics = loss_fn(x, data, seqs, toks)
    loss.backward()
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    assert torch.allclose(x.grad, -data["advantages"] * mask / toks, atol=1e-7)
    assert float(metrics["ratio/max"]) == 1.0


def test_mismatch_metrics_are_zero_and_one_when_sampler_and_policy_agree():
    logprobs, data, seqs, toks = random_batch(5)
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    _, metrics = ClippedPGLossFn()(logprobs, data, seqs, toks)
    assert float(metrics["mismatch/kl"]) == 0.0
    assert float(metrics["mismatch/mult_prob_error"]) == pytest.approx(1.0)


def test_the_grpo_loss_has_the_papers_penalty_and_mean():
    loss_fn = GRPOLossFn()
    assert loss_fn.config.reference_policy_kl_penalty == 0.04
    assert not loss_fn.config.token_level_loss
    assert "reference_policy_logprobs" in loss_fn.required_keys


def test_nll_is_the_mean_over_trained_tokens_by_hand():
    logprobs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, -8.0]])
    data = BatchedDataDict({"token_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]]), "sample_mask": torch.ones(2)})
    loss, metrics = NLLLossFn()(logprobs, data, torch.tensor(2.0), torch.tensor(3.0))
    assert float(loss) == pytest.approx(7 / 3)
    assert float(metrics["loss/nll"]) == pytest.approx(7 / 3)


def test_a_batch_without_trained_tokens_has_no_loss_and_no_nan():
    logprobs, data, _, _ = random_batch(2)
    data["token_mask"] = torch.zeros_like(data["token_mask"])
    loss, metrics = ClippedPGLossFn(CONFIGS["sequence"])(logprobs, data, torch.tensor(0.0), torch.tensor(0.0))
    assert float(loss) == 0.0
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_k1_as_a_loss_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="expected gradient of zero"):
        ClippedPGLossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1")
