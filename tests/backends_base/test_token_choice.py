import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends_base.token_choice import SamplingParameters, next_tokens, uniforms
from rl_core.data.generation_io import derived_seeds

VOCABULARY = 700  # no multiple of the block that masses are summed in
SHAPES = [
    SamplingParameters(),
    SamplingParameters(temperature=0.6),
    SamplingParameters(top_k=9, temperature=1.7),
    SamplingParameters(top_p=0.8),
    SamplingParameters(top_k=40, top_p=0.7, temperature=1.3),
    SamplingParameters(repetition_penalty=1.8, temperature=0.9),
    SamplingParameters(repetition_penalty=0.7, top_p=0.9, top_k=200),
    SamplingParameters(presence_penalty=1.5, temperature=0.8),
    SamplingParameters(min_p=0.1),
    SamplingParameters(min_p=0.02, temperature=1.7, top_k=40, top_p=0.8),
    SamplingParameters(frequency_penalty=-0.7, presence_penalty=0.4, repetition_penalty=1.3, top_k=60),
]
SAMPLED = [3, 50, 3, 12]
"""The part of a row's history that it sampled itself."""


def written_out(logits, parameters, history=(), sampled=()):
    """The distribution by definition, token by token, in float64."""
    scores = [float(x) for x in logits]
    for token in set(history):
        x = scores[token]
        scores[token] = x / parameters.repetition_penalty if x > 0 else x * parameters.repetition_penalty
    for token in set(sampled):
        scores[token] -= parameters.presence_penalty + sampled.count(token) * parameters.frequency_penalty
    scores = [x / parameters.temperature for x in scores]
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept, highest = ranked if parameters.top_k is None else ranked[: parameters.top_k], scores[ranked[0]]
    kept = [token for token in kept if math.exp(scores[token] - highest) >= parameters.min_p]
    weight = {token: math.exp(scores[token] - highest) for token in kept}
    total, reached, nucleus = sum(weight.values()), 0.0, []
    for token in kept:
        if reached >= parameters.top_p * total:
            break
        nucleus.append(token)
        reached += weight[token]
    result = np.zeros(len(scores))
    for token in nucleus:
        result[token] = weight[token] / reached
    return result


def draw(logits, parameters, *, rows, history=None, seed=0, greedy=False):
    tokens, logprobs, _ = next_tokens(
        logits.expand(rows, -1).clone(),
        parameters=parameters,
        greedy=greedy,
        seeds=torch.arange(rows) + seed,
        positions=torch.full((rows,), 17),
        history=None if history is None else torch.tensor([history] * rows),
        sampled=[SAMPLED] * rows,
    )
    return tokens, logprobs


@pytest.fixture(scope="module")
def logits():
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2.5


@pytest.mark.parametrize("parameters", SHAPES, ids=str)
def test_draws_follow_the_distribution_and_report_its_log_probability(logits, parameters):
    history = [3, 3, 50, 699, 12]
    expected = written_out(logits, parameters, history, SAMPLED)
    rows = 20_000
    tokens, logprobs = draw(logits, parameters, rows=rows, history=history)
    # float32 arithmetic on logits of size 10: 1e-5 is a few units in the last place.
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected[tokens.numpy()]), atol=1e-5)
    counts = np.bincount(tokens.numpy(), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    # Pearson's chi-square, rare tokens pooled; five sigma over its mean, for seeds that never change.
    rare = expected * rows < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    mean = np.append(expected[~rare], expected[rare].sum()) * rows
    observed, mean = observed[mean > 0], mean[mean > 0]
    statistic = ((observed - mean) ** 2 / mean).sum()
    freedom = len(mean) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(2, 1100),
    spread=st.floats(0.0, 30.0),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, 1200),
    top_p=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**31),
)
def test_every_draw_is_in_the_support_with_its_defined_probability(vocabulary, spread, temperature, top_k, top_p, seed):
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    parameters = SamplingParameters(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = draw(row, parameters, rows=4, seed=seed)
    expected = written_out(row, parameters)[tokens.numpy()]
    if spread < 1e-3:
        return  # all tie: the nucleus keeps every tying token, the definition above takes them one by one
    # A token at the nucleus's very edge may fall on either side by rounding, which moves the total by its own mass.
    assert np.all(expected > 0) or top_p < 1.0
    inside = expected > 0
    np.testing.assert_allclose(logprobs.numpy()[inside], np.log(expected[inside]), atol=2e-2 if top_p < 1.0 else 2e-4)


def test_the_nucleus_of_a_flat_row_is_found_beyond_the_candidates_that_are_sorted_first():
    row = torch.linspace(0.0, 1e-2, 5000)
    parameters = SamplingParameters(top_p=0.9)
    tokens, logprobs = draw(row, parameters, rows=3000)
    expected = written_out(row, parameters)
    support = np.flatnonzero(expected)
    assert tokens.min() >= support[0] - 2  # by rounding
    np.testing.assert_allclose(logprobs.numpy(), np.log(1 / len(support)), atol=2e-2)


def test_tokens_tied_with_the_last_kept_token_are_kept():
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    for parameters in (SamplingParameters(top_k=2), SamplingParameters(top_p=0.4)):
        tokens, logprobs = draw(row, parameters, rows=500)
        assert set(tokens.tolist()) == {1, 2, 3}
        torch.testing.assert_close(logprobs, torch.full((500,), -math.log(3)))


def test_greedy_takes_the_most_likely_token_and_reports_its_temperature_scaled_logprob(logits):
    parameters = SamplingParameters(temperature=0.5, top_k=3, top_p=0.2)
    tokens, logprobs = draw(logits, parameters, rows=2, greedy=True)
    assert tokens.tolist() == [int(logits.argmax())] * 2
    torch.testing.assert_close(logprobs, (logits.double() / 0.5).log_softmax(-1).max().float().expand(2))


def test_a_token_with_probability_one_is_always_sampled():
    for token in (0, 255, 256, 511, 512, 698, 699):
        row = torch.full((VOCABULARY,), float("-inf"))
        row[token] = 4.0
        tokens, logprobs = draw(row, SamplingParameters(), rows=200)
        assert tokens.tolist() == [token] * 200
        assert logprobs.abs().max() == 0.0


def test_bfloat16_logits_give_float32_log_probabilities_of_those_logits(logits):
    low = logits.bfloat16()
    tokens, logprobs = draw(low, SamplingParameters(), rows=50)
    torch.testing.assert_close(logprobs, low.float().log_softmax(-1)[tokens], atol=1e-5, rtol=0)


def test_uniforms_are_two_rounds_of_splitmix64():
    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    pairs = [(0, 0), (1, 0), (0, 1), (-5, 1000), (2**63 - 1, 77), (-(2**63), 3)]
    expected = [(mix((mix((s + golden) % 2**64) + (p + 1) * golden) % 2**64) >> 11) * 2.0**-53 for s, p in pairs]
    seeds, positions = torch.tensor(pairs).unbind(dim=1)
    assert uniforms(seeds, positions).tolist() == expected


def test_uniforms_of_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated():
    grid = uniforms(torch.arange(500).repeat_interleave(200), torch.arange(200).repeat(500)).view(500, 200)
    counts = torch.histc(grid.float(), bins=100, min=0, max=1)
    # 100,000 draws: each bin has 1000 +- 32, so five sigma.
    assert (counts - 1000).abs().max() < 160
    for other in (grid[1:, :], grid[:, 1:]):
        here = grid[: other.shape[0], : other.shape[1]]
        correlation = ((here - 0.5) * (other - 0.5)).mean() * 12
        assert correlation.abs() < 5 / math.sqrt(here.numel())


def test_derived_seeds_differ_between_rows_calls_and_seeds():
    seeds = torch.cat([derived_seeds(seed, call, 500) for seed in range(4) for call in range(4)])
    assert len(set(seeds.tolist())) == len(seeds)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("parameters", SHAPES, ids=str)
def test_the_most_likely_tokens_are_those_of_the_sampled_distribution(logits, parameters, greedy):
    history = [3, 3, 50, 699, 12]
    kept = replace(parameters, top_k=None, top_p=1.0, min_p=0.0) if greedy else parameters
    expected = written_out(logits, kept, history, SAMPLED)
    _, _, likely = next_tokens(
        logits.expand(2, -1).clone(),
        parameters=parameters,
        greedy=greedy,
        seeds=torch.arange(2),
        positions=torch.full((2,), 17),
        history=torch.tensor([history] * 2),
        sampled=[SAMPLED] * 2,
        likely=20,
    )
    order = np.argsort(-expected)[: min(20, np.count_nonzero(expected))]
    assert [token for token, _ in likely[0]] == order.tolist()
    np.testing.assert_allclose([logprob for _, logprob in likely[1]], np.log(expected[order]), atol=1e-5)
