"""Draws tokens from logits and returns their log-probabilities under the sampling distribution.

A draw inverts the cumulative distribution at a uniform number that depends only on the row's seed and the token's position. A
row's tokens therefore do not depend on other rows or on the order of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from rl_core.config.schema import GenerationConfig
from rl_core.data.generation_io import MOST_SET_IDS, SETS, mix, shift_right
from rl_core.errors import DataError

_BLOCK: Final = 256
"""Vocabulary entries summed together: the cumulative sum runs over blocks, then inside one block."""
_NUCLEUS_CANDIDATES: Final = 1024
"""Number of tokens per row that are sorted for top-p before falling back to the whole vocabulary."""
LIKELY_TOKENS: Final = "top_logprobs"
"""Option of a row: the number of most likely tokens to report at each position."""
STOP_TOKENS: Final = "stop_token_ids"
"""Option of a row: tokens that end it, in addition to the engine's."""
ROW_OPTIONS: Final = (
    *(LIKELY_TOKENS, SETS, STOP_TOKENS, "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Options of single rows, besides temperature, top-p and top-k."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """The distribution that tokens are drawn from, computed in this order.

    1. `repetition_penalty` r on the raw logits x of each token in the row, including the prompt: x / r if x > 0, else x * r
       (Keskar et al. 2019, arXiv:1909.05858). Then, for each token that was sampled c > 0 times, x - `presence_penalty` -
       c * `frequency_penalty`, as in OpenAI's API.
    2. `temperature`: logits are divided by it.
    3. `top_k`: the k most likely tokens are kept, and all that tie with the last of them. Of these, `min_p` keeps tokens with
       at least this share of the highest probability.
    4. `top_p`: of these, renormalized, the smallest set of most likely tokens with total probability of at least p is kept, and
       all that tie with the last of them.
    5. The kept tokens are renormalized.

    A greedy row takes the most likely token after step 1 and reports its log-probability after step 2.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, config: GenerationConfig, *, repetition_penalty: float = 1.0) -> SamplingParameters:
        """The distribution of a section `policy.generation`."""
        return cls(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=repetition_penalty,
        )

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    def with_own(self, own: Mapping[str, Any]) -> SamplingParameters:
        """The parameters of a row that has its own values of some.

        Raises:
            DataError: a value is not allowed.
        """
        if not (given := {name: own[name] for name in vars(self) if own.get(name) is not None}):
            return self
        changed = replace(self, **given)
        top_k = 1 if changed.top_k is None else changed.top_k
        factors = (changed.temperature, changed.repetition_penalty)
        is_finite = all(map(math.isfinite, (*factors, changed.presence_penalty, changed.frequency_penalty)))
        is_filter = 0.0 < changed.top_p <= 1.0 and 0.0 <= changed.min_p <= 1.0 and top_k >= 1
        if not is_finite or min(factors) <= 0.0 or not is_filter:
            raise DataError(
                f"The sampling parameters {dict(own)} are not allowed: temperature and repetition_penalty must be above 0, "
                "top_p above 0 and at most 1, min_p from 0 to 1, top_k at least 1, and all of them finite."
            )
        return changed


def next_tokens(
    logits: torch.Tensor,
    *,
    parameters: SamplingParameters,
    greedy: bool,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor | None = None,
    sampled: Sequence[Sequence[int]] = (),
    likely: int = 0,
    sets: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, float]]]]:
    """One token for each row and its log-probability, and the most likely tokens.

    Args:
        logits: [N, V] of any floating type; overwritten if float32.
        parameters: the distribution.
        greedy: take the most likely token.
        seeds: [N] int64.
        positions: [N] int64, position in the row of the token to draw.
        history: [N, T] int64, tokens of each row (padded with any of them); used only by the repetition penalty.
        sampled: sampled tokens of each row; used only by the presence and frequency penalties.
        likely: number of most likely tokens to return for each row.
        sets: the words of each row's set of kept tokens (`SampledSets`) are appended, unless all are kept or the row is greedy.

    Returns:
        Tokens [N] int64, log-probabilities [N] float32 in nats, and the `likely` most likely tokens of each row with their
        log-probabilities; fewer if fewer have a probability, and no lists if `likely` is 0.
    """
    scores = logits.float()
    if parameters.repetition_penalty != 1.0 and history is not None:
        _apply_repetition_penalty(scores, history, parameters.repetition_penalty)
    if parameters.presence_penalty or parameters.frequency_penalty:
        _subtract_penalties(scores, sampled, parameters)
    if parameters.temperature != 1.0:
        scores.div_(parameters.temperature)
    if greedy:
        tokens = scores.argmax(dim=-1)
        return tokens, _gather(scores, tokens) - scores.logsumexp(dim=-1), _most_likely(scores, likely)
    if parameters.is_filtered:
        dropped = scores < _score_threshold(scores, parameters)
        scores.masked_fill_(dropped, float("-inf"))
        if sets is not None:
            sets += _words_of_sets(~dropped)
    alternatives = _most_likely(scores, likely)
    highest = scores.amax(dim=-1, keepdim=True)
    mass = scores.sub_(highest).exp_()
    tokens, total = _inverse_cdf(mass, uniforms(seeds, positions))
    return tokens, (_gather(mass, tokens).double().log() - total.log()).float(), alternatives


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[N] float64 in [0, 1): a hash of each (seed, position), 53 bits of two rounds of splitmix64."""
    golden = -7046029254386353131  # 0x9E3779B97F4A7C15; int64 arithmetic wraps as uint64 does
    state = mix(seeds + golden)
    state = mix(state + (positions + 1) * golden)
    return shift_right(state, 11).double() * 2.0**-53


def _gather(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _apply_repetition_penalty(scores: torch.Tensor, history: torch.Tensor, penalty: float) -> None:
    present = scores.gather(1, history)
    # Tokens that occur twice are written twice with the same value.
    scores.scatter_(1, history, torch.where(present > 0, present / penalty, present * penalty))


def _subtract_penalties(scores: torch.Tensor, sampled: Sequence[Sequence[int]], parameters: SamplingParameters) -> None:
    for row, tokens in zip(scores, sampled, strict=True):
        distinct, counts = torch.tensor(tokens, dtype=torch.int64, device=scores.device).unique(return_counts=True)
        row[distinct] -= parameters.presence_penalty + counts * parameters.frequency_penalty


def _most_likely(scores: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens of each row with their log-probabilities, without those of probability 0."""
    if count == 0:
        return []
    best = scores.log_softmax(dim=-1).topk(min(count, scores.shape[1]), dim=-1)
    return [
        [(token, logprob) for token, logprob in zip(*row, strict=True) if logprob > -math.inf]
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _words_of_sets(kept: torch.Tensor) -> list[torch.Tensor]:
    """The words [n] int32 of each row of `kept` [N, V] bool; see `SampledSets`."""
    rows, ids = kept.nonzero().cpu().unbind(dim=1)
    sets = ids.to(torch.int32).split(torch.bincount(rows, minlength=len(kept)).tolist())
    return [each if len(each) <= MOST_SET_IDS else _mask_of(each.long(), kept.shape[1]) for each in sets]


def _mask_of(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    words = torch.zeros(-(-vocabulary // 32), dtype=torch.int64).index_add_(0, ids // 32, 1 << (ids % 32))
    return torch.cat([torch.full((1,), -1), words]).to(torch.int32)


def _score_threshold(scores: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """[N, 1], the lowest score that is kept."""
    vocabulary = scores.shape[1]
    floor = scores.new_full((len(scores), 1), float("-inf"))
    if parameters.min_p:
        floor = scores.amax(dim=-1, keepdim=True) + math.log(parameters.min_p)
    if parameters.top_k is not None:
        floor = torch.maximum(floor, scores.topk(min(parameters.top_k, vocabulary), dim=-1).values[:, -1:])
    if parameters.top_k is not None or parameters.min_p:
        scores = scores.masked_fill(scores < floor, float("-inf"))
    if parameters.top_p >= 1.0:
        return floor
    totals = scores.logsumexp(dim=-1, keepdim=True)
    # On a GPU, the host would wait to learn whether the candidates suffice.
    count = vocabulary if scores.device.type == "cuda" else min(_NUCLEUS_CANDIDATES, vocabulary)
    nucleus, reached = _nucleus_threshold(scores.topk(count, dim=-1).values, totals, parameters.top_p)
    if count < vocabulary and not bool(reached.all()):
        wide = (~reached).nonzero().squeeze(1)
        ranked = scores[wide].sort(dim=-1, descending=True).values
        nucleus[wide] = _nucleus_threshold(ranked, totals[wide], parameters.top_p)[0]
    return torch.maximum(floor, nucleus)


def _nucleus_threshold(ranked: torch.Tensor, totals: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest score of the nucleus [N, 1] among the `ranked` ones, and whether they reach `top_p` [N]."""
    cumulative = (ranked - totals).double().exp().cumsum(dim=-1)
    inside = (cumulative < top_p).sum(dim=-1, keepdim=True).clamp_(max=ranked.shape[1] - 1)
    return ranked.gather(1, inside), cumulative[:, -1] >= top_p


def _inverse_cdf(mass: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N] and total mass [N] float64 of unnormalized `mass` [N, V].

    Uses two levels to avoid a cumulative sum over the vocabulary, which would be slow and, in float32, wrong in the fourth
    digit.
    """
    vocabulary = mass.shape[1]
    whole = vocabulary // _BLOCK
    sums = mass[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).sum(dim=-1)
    if whole * _BLOCK < vocabulary:
        sums = torch.cat([sums, mass[:, whole * _BLOCK :].sum(dim=-1, keepdim=True)], dim=1)
    below = sums.double().cumsum(dim=-1)
    total = below[:, -1]
    target = (uniform * total).unsqueeze(1)
    block = torch.searchsorted(below, target, right=True).clamp_(max=below.shape[1] - 1)
    block = _clamp_to_mass(sums, block)
    target = target - (below.gather(1, block) - sums.double().gather(1, block))
    indices = block * _BLOCK + torch.arange(_BLOCK, device=mass.device)
    inner = mass.gather(1, indices.clamp(max=vocabulary - 1)).masked_fill_(indices >= vocabulary, 0.0)
    offset = torch.searchsorted(inner.double().cumsum(dim=-1), target, right=True).clamp_(max=_BLOCK - 1)
    offset = _clamp_to_mass(inner, offset)
    return (block * _BLOCK + offset).squeeze(1), total


def _clamp_to_mass(mass: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """`choice` [N, 1], or the last index with mass if rounding carried it past that."""
    indices = torch.arange(mass.shape[1], device=mass.device)
    return torch.minimum(choice, torch.where(mass > 0, indices, 0).amax(dim=-1, keepdim=True))
