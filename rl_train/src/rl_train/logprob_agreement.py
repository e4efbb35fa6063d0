"""Whether a training backend and an inference backend agree on the probability of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeVar

import torch

from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import PolicyInterface
from rl_core.testing.outputs.models import generated

QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)
"""Quantiles of |d| that are reported."""
LARGE_DIFFERENCES: Final = (0.1, 1.0)
"""Sizes of |d|, in nats; the share of tokens beyond each is reported."""
_EDGES: Final = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 2**31)
MIN_RANGE_TOKENS: Final = 500
"""Minimum number of tokens for a separate check of a range of positions: there are ten ranges, and with fewer tokens one of
them would exceed the threshold by chance too often."""
_Z: Final = 2.326
"""The 99 % quantile of the standard normal distribution."""


_Number = TypeVar("_Number", float, torch.Tensor)


class TokenDifferences:
    """Log-probabilities of the same tokens on two sides.

    Args:
        token_ids: [B, T] or [N].
        policy: log-probabilities of the same shape, in nats.
        engine: likewise.
        compared: bool of the same shape: the tokens that are compared; all by default.

    Attributes:
        signed: float64, the policy's minus the engine's; 0 for tokens that are not compared.
        num_tokens: number of compared tokens.
    """

    def __init__(
        self, token_ids: torch.Tensor, policy: torch.Tensor, engine: torch.Tensor, *, compared: torch.Tensor | None = None
    ) -> None:
        self.token_ids, self.policy, self.engine = token_ids, policy, engine
        self.compared = torch.ones_like(token_ids, dtype=torch.bool) if compared is None else compared
        self.signed = torch.where(self.compared, (policy - engine).double(), 0.0)
        self.num_tokens = int(self.compared.sum())

    @property
    def sizes(self) -> torch.Tensor:
        """|signed|."""
        return self.signed.abs()

    @property
    def mean(self) -> float:
        """Mean size, in nats per compared token; NaN if there is none."""
        return float(self.sizes.sum() / self.num_tokens)

    def worst(self) -> tuple[int, ...]:
        """Index of the compared token with the largest size; NaN is the largest."""
        sizes = torch.where(self.compared, self.sizes, -1.0)
        return tuple(int(axis) for axis in torch.unravel_index(sizes.argmax(), sizes.shape))

    def values_at(self, at: tuple[int, ...]) -> str:
        """Both log-probabilities of a token, in words."""
        return f"{float(self.engine[at]):.4f} in the engine and {float(self.policy[at]):.4f} in the policy"


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """One sampled token and its log-probability on each side."""

    row: int
    """In the batch."""
    position: int
    """In the completion, from 0."""
    token_id: int
    training_logprob: float
    """In nats."""
    inference_logprob: float
    """In nats."""


@dataclass(frozen=True, kw_only=True)
class PositionRange:
    """The tokens at some positions of their completions: where later ones are worse, decoding drifts."""

    first: int
    """First position in the completion, from 0."""
    last: int
    """Last position, inclusive."""
    num_tokens: int
    multiplicative_error: float
    """exp(mean |d|)."""
    mean_difference: float
    """Mean d, in nats."""
    max_abs_difference: float
    """Largest |d|, in nats."""

    @property
    def label(self) -> str:
        """`4-15`, or `0` for a single position."""
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


@dataclass(frozen=True, kw_only=True)
class LogProbabilityAgreement:
    """How far two backends' log-probabilities of the same sampled tokens are apart.

    With d = log p of the training backend minus log p of the inference backend, over all sampled tokens.
    """

    multiplicative_error: float
    """exp(mean |d|); 1 if they agree."""
    mean_abs_difference: float
    """Mean |d|, in nats."""
    mean_difference: float
    """Mean d, in nats: a bias shows here."""
    max_abs_difference: float
    """Largest |d|, in nats."""
    worst: TokenDifference
    """The token with the largest |d|."""
    quantiles: Mapping[float, float]
    """Quantiles of |d| in nats, by `QUANTILES`."""
    kl: float
    """Estimate (k3) of KL(inference || training), in nats a token (http://joschu.net/blog/kl-approx.html)."""
    share_beyond: Mapping[float, float]
    """Share of tokens whose |d| is larger than each of `LARGE_DIFFERENCES`."""
    by_position: tuple[PositionRange, ...]
    """The same by position in the completion; ranges without a token are left out."""
    num_tokens: int
    """Number of sampled tokens that were compared."""
    num_rows: int
    """Number of completions that these tokens belong to."""

    def failures(self, threshold: float) -> list[str]:
        """The values above `threshold`, one sentence each; empty if the two are consistent.

        Two values are compared with `largest_error` of their sample: exp(mean |d|) of all tokens, and that of each range of
        positions that has at least `MIN_RANGE_TOKENS` tokens, so that many good early tokens cannot hide late ones that drift.
        NaN exceeds every threshold.
        """
        judged = [("over all tokens", self.multiplicative_error, self.num_tokens)]
        judged += [
            (f"at positions {part.label} of the completion", part.multiplicative_error, part.num_tokens)
            for part in self.by_position
            if part.num_tokens >= MIN_RANGE_TOKENS
        ]
        return [
            f"exp(mean |d|) is {error:.6g} {where}, and {threshold:.6g} is allowed "
            f"({largest_error(threshold, tokens):.6g} with the sampling error of {tokens} tokens)"
            for where, error, tokens in judged
            if not error <= largest_error(threshold, tokens)
        ]


def largest_error(threshold: float, num_tokens: int) -> float:
    """The largest exp(mean |d|) that `num_tokens` tokens may show if the true one is `threshold`.

    The mean of few tokens is above the true mean by chance about half of the time. The statistic is the mean of |d| over n
    tokens, tested against the hypothesis that |d| is exponentially distributed with the mean m = log(threshold). An exponential
    distribution has a standard deviation equal to its mean, as measured for rounding errors in bfloat16 (0.04 nats each). Under
    it the mean of n tokens is m times a Gamma(n, 1/n) variable, of which this is the 99 % quantile by the approximation of
    Wilson and Hilferty (1931): m (1 - 1/(9n) + z/(3 sqrt(n)))^3 with z = 2.326. The spread is that of the hypothesis and not of
    the sample, so a few tokens with large differences, the mark of a real disagreement, do not widen the limit.

    With a threshold of 1.05, 11 tokens may show 1.094, 24 tokens 1.078, 100 tokens 1.063, 1000 tokens 1.054; the limit tends to
    the threshold.
    """
    return math.exp(math.log(threshold) * sampling_error(float(num_tokens)))


def sampling_error(num_tokens: _Number) -> _Number:
    """The factor by which the mean |d| of this many tokens (at least 1) may exceed the true mean; see `largest_error`."""
    factor: _Number = (1.0 - 1.0 / (9.0 * num_tokens) + _Z / (3.0 * num_tokens**0.5)) ** 3
    return factor


def sampled_tokens(samples: BatchedDataDict[Any]) -> torch.Tensor:
    """[B, T] bool: the tokens that were sampled; see `GenerationOutputSpec` for `samples`."""
    lengths = samples["unpadded_sequence_lengths"].unsqueeze(1)
    column = torch.arange(samples["output_ids"].shape[1])
    sampled: torch.Tensor = (column >= lengths - samples["generation_lengths"].unsqueeze(1)) & (column < lengths)
    return sampled


def rows_to_score(samples: BatchedDataDict[Any], prompts: Mapping[str, Any] | None = None) -> BatchedDataDict[Any]:
    """Prompts and completions as the policy scores them.

    Args:
        samples: see `GenerationOutputSpec`.
        prompts: what they were sampled from; their images are those of the rows.
    """
    rows = {"input_ids": samples["output_ids"], "input_lengths": samples["unpadded_sequence_lengths"]}
    sets = {SETS: samples[SETS]} if SETS in samples else {}
    images = {"images": prompts["images"]} if prompts is not None and "images" in prompts else {}
    return BatchedDataDict({**rows, **sets, **images})


def compare_log_probabilities(
    training_backend: PolicyInterface, inference_backend: GenerationInterface, test_data: BatchedDataDict[Any]
) -> LogProbabilityAgreement:
    """Sample from the inference backend and score its tokens with the training backend.

    Args:
        training_backend: computes the log-probabilities.
        inference_backend: samples; it must hold the same weights and have the same temperature.
        test_data: prompts, see `GenerationDatumSpec`.

    Raises:
        DataError: no token was sampled.
    """
    inference_backend.prepare_for_generation()
    section, facts = getattr(inference_backend, "config", None), getattr(inference_backend, "facts", {})
    if isinstance(section, GenerationConfig) and section.sampling_filters() and SETS in facts.get("row_options", ()):
        test_data = BatchedDataDict({**test_data, "sampling": [{SETS: True}] * test_data.size})
    output = generated(inference_backend, test_data, greedy=False)
    inference_backend.finish_generation()
    return score_samples(training_backend, output, test_data)


def score_samples(
    training_backend: PolicyInterface, samples: BatchedDataDict[Any], prompts: Mapping[str, Any] | None = None
) -> LogProbabilityAgreement:
    """Score what an inference backend has sampled, and compare.

    Args:
        training_backend: computes the log-probabilities.
        samples: see `GenerationOutputSpec`.
        prompts: what they were sampled from.

    Raises:
        DataError: there is no sampled token in it.
    """
    trained = training_backend.get_logprobs(rows_to_score(samples, prompts))["logprobs"]
    mask = sampled_tokens(samples)
    if not mask.any():
        raise DataError("No token was sampled, so there is nothing to compare. Give prompts that leave room for an answer.")
    differences = TokenDifferences(samples["output_ids"], trained, samples["logprobs"], compared=mask)
    difference, size = differences.signed[mask], differences.sizes[mask]
    worst = differences.worst()
    starts = (samples["unpadded_sequence_lengths"] - samples["generation_lengths"]).unsqueeze(1)
    positions = torch.arange(mask.shape[1]) - starts
    return LogProbabilityAgreement(
        multiplicative_error=float(size.mean().exp()),
        mean_abs_difference=float(size.mean()),
        mean_difference=float(difference.mean()),
        max_abs_difference=float(size.max()),
        worst=TokenDifference(
            row=worst[0],
            position=int(positions[worst]),
            token_id=int(samples["output_ids"][worst]),
            training_logprob=float(trained[worst]),
            inference_logprob=float(samples["logprobs"][worst]),
        ),
        quantiles=_quantiles(size),
        kl=float((difference.expm1() - difference).mean()),
        share_beyond={limit: float((size > limit).double().mean()) for limit in LARGE_DIFFERENCES},
        by_position=tuple(_by_position(difference, positions[mask])),
        num_tokens=differences.num_tokens,
        num_rows=int(mask.any(dim=1).sum()),
    )


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict[Any],
    threshold: float = 1.05,
) -> bool:
    """Whether the multiplicative error exp(mean |Δ log p|) of the sampled tokens is at most `threshold`, up to sampling error.

    False means that the sample shows a larger error than one sample in a hundred of a pair whose true error equals
    `threshold`: the mean |Δ log p| over n tokens is compared with log(threshold) times the 99 % quantile of the mean of n
    exponential variables of mean 1 (`largest_error`: a factor of 1.8 for 11 tokens, 1.07 for 1000). The same holds for every
    range of positions with enough tokens, see `LogProbabilityAgreement.failures`; `compare_log_probabilities` has the numbers.

    Args:
        training_backend: computes the log-probabilities.
        inference_backend: samples the completions.
        test_data: prompts.
        threshold: 1.05 is usual for bfloat16; float32 backends agree within 1.001.
    """
    return not compare_log_probabilities(training_backend, inference_backend, test_data).failures(threshold)


def _quantiles(size: torch.Tensor) -> dict[float, float]:
    """Nearest-rank quantiles: each is the |d| of a token that exists (and there is no limit on their number)."""
    ordered = size.sort().values
    return {share: float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)]) for share in QUANTILES}


def _by_position(difference: torch.Tensor, position: torch.Tensor) -> Iterator[PositionRange]:
    for first, end in pairwise(_EDGES):
        chosen = difference[(position >= first) & (position < end)]
        if len(chosen):
            yield PositionRange(
                first=first,
                last=end - 1,
                num_tokens=len(chosen),
                multiplicative_error=float(chosen.abs().mean().exp()),
                mean_difference=float(chosen.mean()),
                max_abs_difference=float(chosen.abs().max()),
            )
