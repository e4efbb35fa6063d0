"""Log-probability agreement compared with a loop over tokens in plain Python, and its pass criteria."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_train.logprob_agreement import (
    MIN_RANGE_TOKENS,
    compare_log_probabilities,
    largest_error,
    score_samples,
    validate_log_probability_consistency,
)


def test_every_number_equals_a_loop_over_the_tokens(policy, engine, prompts):
    scorer = policy(generation={"backend": "hf", "temperature": 0.7})
    samples = engine(temperature=1.4).generate(prompts, greedy=False)
    found = score_samples(scorer, samples)

    scores = scorer.get_logprobs(
        BatchedDataDict({"input_ids": samples["output_ids"], "input_lengths": samples["unpadded_sequence_lengths"]})
    )["logprobs"].tolist()
    said, ids = samples["logprobs"].tolist(), samples["output_ids"].tolist()
    tokens = []  # (row, position, id, log p of the policy, log p of the engine)
    for row, (end, new) in enumerate(
        zip(samples["unpadded_sequence_lengths"].tolist(), samples["generation_lengths"].tolist(), strict=True)
    ):
        start = end - new
        tokens += [(row, t - start, ids[row][t], scores[row][t], said[row][t]) for t in range(start, end)]
    d = [p - q for *_, p, q in tokens]
    size = [abs(x) for x in d]

    # The same float32 inputs; both sides add up in float64, so only the order of a sum may differ.
    close = {"rel": 1e-9}
    assert found.num_tokens == len(tokens) > 20
    assert found.num_rows == len(prompts["input_ids"])
    assert found.mean_abs_difference == pytest.approx(sum(size) / len(size), **close)
    assert found.multiplicative_error == pytest.approx(math.exp(sum(size) / len(size)), **close)
    assert found.mean_difference == pytest.approx(sum(d) / len(d), **close)
    assert found.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d), **close)
    assert found.share_beyond == {limit: sum(x > limit for x in size) / len(size) for limit in (0.1, 1.0)}
    for share, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(size, share, method="inverted_cdf"), **close)
    worst = tokens[size.index(max(size))]
    assert found.max_abs_difference == pytest.approx(max(size), **close)
    assert (found.worst.row, found.worst.position, found.worst.token_id) == worst[:3]
    assert (found.worst.training_logprob, found.worst.inference_logprob) == pytest.approx(worst[3:])
    for part in found.by_position:
        inside = [x for x, (_, position, *_) in zip(d, tokens, strict=True) if part.first <= position <= part.last]
        assert part.num_tokens == len(inside)
        assert part.mean_difference == pytest.approx(sum(inside) / len(inside), rel=1e-9, abs=1e-15)
        assert part.max_abs_difference == pytest.approx(max(map(abs, inside)), **close)
        assert part.multiplicative_error == pytest.approx(math.exp(sum(map(abs, inside)) / len(inside)), **close)
    assert sum(part.num_tokens for part in found.by_position) == len(tokens)


def test_the_same_model_on_both_sides_agrees_in_float32_and_less_in_bfloat16(policy, engine, prompts):
    exact = compare_log_probabilities(policy(), engine(), prompts)
    assert exact.failures(1.001) == []
    rounded = compare_log_probabilities(policy(), engine(precision="bfloat16"), prompts)
    # 8 bits of mantissa: log-probabilities of a few nats are off by some hundredths, far beyond float32's 1e-6.
    assert 1.0001 < rounded.multiplicative_error < 1.1
    assert validate_log_probability_consistency(policy(), engine(), prompts)


def test_a_perturbed_tensor_is_found(policy, engine, prompts, changed_model):
    def scale(tensors):
        tensors["model.norm.weight"] *= 1.3

    perturbed = policy(changed_model(scale))
    [failure] = compare_log_probabilities(perturbed, engine(), prompts).failures(1.05)
    assert "over all tokens, and 1.05 is allowed" in failure
    assert not validate_log_probability_consistency(perturbed, engine(), prompts)


def samples_with(differences):
    """Samples and a policy whose log-probabilities differ by `differences`, one list per row; one-token prompts."""
    width = max(map(len, differences)) + 1
    rows = torch.zeros(len(differences), width)
    for row, values in enumerate(differences):
        rows[row, 1 : len(values) + 1] = torch.tensor(values)
    lengths = torch.tensor([len(values) for values in differences])
    samples = BatchedDataDict(
        {
            "output_ids": torch.zeros(len(differences), width, dtype=torch.int64),
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": lengths + 1,
            "logprobs": torch.zeros(len(differences), width),
        }
    )
    return SimpleNamespace(get_logprobs=lambda data: {"logprobs": rows}), samples


def test_drift_of_late_tokens_is_not_hidden_by_earlier_tokens():
    found = score_samples(*samples_with([[0.0] * 256 + [0.06] * 744] * 4))
    assert found.multiplicative_error < 1.05
    assert found.failures(1.05) == [
        "exp(mean |d|) is 1.06184 at positions 256-1023 of the completion, and 1.05 is allowed "
        "(1.05221 with the sampling error of 2976 tokens)",
    ]


def test_a_position_range_with_few_tokens_is_shown_but_not_checked():
    late = MIN_RANGE_TOKENS - 1
    found = score_samples(*samples_with([[0.0] * 256] * 60 + [[0.0] * 256 + [0.5] * late]))
    assert found.by_position[-1].num_tokens == late
    assert found.by_position[-1].multiplicative_error > 1.6
    assert found.failures(1.05) == []


def test_short_samples_of_a_pair_that_rounds_as_bfloat16_does_are_accepted():
    # Measured on SmolLM2-135M-Instruct in bfloat16: agreeing pairs show 1.036 to 1.057 on 11 to 24 tokens.
    for tokens in (11, 24):
        assert score_samples(*samples_with([[math.log(1.057)] * tokens])).failures(1.05) == []
    draw = torch.Generator().manual_seed(0)
    rejected = plain = 0
    for _ in range(500):
        noise = torch.empty(16).exponential_(1 / 0.04, generator=draw).tolist()
        found = score_samples(*samples_with([noise]))
        rejected += bool(found.failures(1.05))
        plain += found.multiplicative_error > 1.05
    assert rejected <= 2
    assert plain > 50


def test_a_short_sample_of_a_real_disagreement_is_rejected(policy, engine, prompts):
    few = prompts.select_indices([0, 1, 2, 3])
    found = compare_log_probabilities(policy(), engine(temperature=1.6), few)
    assert found.num_tokens <= 24
    assert len(found.failures(1.05)) == 1
    # Few tokens far apart, as a wrong token at a boundary has them, do not widen the limit either.
    assert score_samples(*samples_with([[0.0] * 15 + [3.0]])).failures(1.05)


@pytest.mark.parametrize("tokens", [1, 11, 24, 100, 1000])
def test_the_limit_of_a_sample_is_the_quantile_of_a_mean_of_exponential_variables(tokens):
    torch.manual_seed(0)
    means = torch.distributions.Gamma(float(tokens), float(tokens)).sample((400_000,))
    exact = math.exp(math.log(1.05) * float(means.quantile(0.99)))
    assert largest_error(1.05, tokens) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_beyond_every_threshold(broken):
    found = score_samples(*samples_with([[0.0, 0.0, broken], [0.0]]))
    assert len(found.failures(1e9)) == 1
    assert (found.worst.row, found.worst.position) == (0, 2)


def test_a_bias_keeps_its_sign():
    assert score_samples(*samples_with([[-0.25, -0.75]])).mean_difference == pytest.approx(-0.5)


def test_comparing_without_samples_is_an_error():
    policy, samples = samples_with([[0.0]])
    samples["generation_lengths"] = torch.tensor([0])
    with pytest.raises(DataError, match="leave room for an answer"):
        score_samples(policy, samples)
