"""Policy-gradient losses that limit a step otherwise than by PPO's clip; each is a term of `PolicyGradientLossFn`.

    DPPO        drops tokens whose probability has moved too far: https://arxiv.org/abs/2602.04879
    SAPO        a sigmoid of the ratio: https://arxiv.org/abs/2511.20347
    GMPO        the geometric mean of the clipped ratios of a sequence: https://arxiv.org/abs/2507.20673
    VESPO       weights tokens by a function of the ratio of the whole sequence: https://arxiv.org/abs/2602.10693
    GSPO        in the form of its equation 5, one advantage per sequence: https://arxiv.org/abs/2507.18071
    Clip-Cov    tokens of high covariance have no gradient: https://arxiv.org/abs/2505.22617
    KL-Cov      tokens of the highest covariance have a KL penalty: the same paper

Notation: A advantage, r importance ratio, p and q the probabilities of a token under the current policy and under the one that
the ratio compares with; sg stops the gradient. With r = 1, before the first optimizer step on a batch, all of them have the
gradient of -A · log p, up to the tokens that Clip-Cov leaves out.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses.config import (
    ClipCovLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    KLCovLossConfig,
    SAPOLossConfig,
    VESPOLossConfig,
)
from rl_train.algorithms.losses.means import LOG_RATIO_BOUND, row_means, row_sums, sequence_ratio
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn, PolicyGradientLossFn, Tokens

_HIGH_COVARIANCE = "high_covariance"
_Term = tuple[torch.Tensor, torch.Tensor | None]


class DPPOLossFn(PolicyGradientLossFn):
    """-A · r, and 0 for tokens whose probability has moved too far in the direction of A; plus w · (log r)².

        tv    |p - q|
        kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    With A > 0, a token is dropped if p > q and its divergence exceeds `divergence_max_above`; with A < 0, if p < q and it
    exceeds `divergence_max_below`. w is `log_ratio_penalty`, 0 in the paper.
    """

    needs_advantages: ClassVar[bool] = True
    config: DPPOLossConfig

    def rows_with_gradient(self, data: BatchedDataDict[Any]) -> torch.Tensor | None:
        """As without the penalty on the log-ratio; all with it."""
        return None if self.config.log_ratio_penalty else super().rows_with_gradient(data)

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        dropped = self._dropped(tokens)
        loss = torch.where(dropped, 0.0, -tokens.advantages * ratio)
        if self.config.log_ratio_penalty:
            loss = loss + self.config.log_ratio_penalty * tokens.log_ratio.square()
        return loss, dropped

    @torch.no_grad()
    def _dropped(self, tokens: Tokens) -> torch.Tensor:
        log_p, log_q, mask = tokens.logprobs, tokens.compared, tokens.mask
        moved = log_p.exp() - log_q.exp()
        divergence = moved.abs() if self.config.divergence == "tv" else binary_kl(log_q, log_p)
        below, above = self.config.divergence_bounds
        up = (tokens.advantages > 0) & (moved > 0) & (divergence > above)
        down = (tokens.advantages < 0) & (moved < 0) & (divergence > below)
        return (up | down) & (mask > 0)


def binary_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of the events that a token is sampled or not, from its log-probabilities; in nats, with their shape.

    Probabilities above 1 - 1e-7 count as 1 - 1e-7, the resolution of float32.
    """
    not_q, not_p = -torch.expm1(log_q.clamp(max=-1e-7)), -torch.expm1(log_p.clamp(max=-1e-7))
    return log_q.exp() * (log_q - log_p) + not_q * (not_q / not_p).log()


class SAPOLossFn(PolicyGradientLossFn):
    """-A · 4 / tau · sigmoid(tau (r - 1)), with tau = `temperature_positive` if A > 0, else `temperature_negative`.

    The gradient at r = 1 is that of -A · r, and it fades as r moves away from 1 in either direction. Nothing is clipped.
    """

    needs_advantages: ClassVar[bool] = True
    config: SAPOLossConfig

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        tau = torch.full_like(ratio, self.config.temperature_negative)
        tau = tau.masked_fill(tokens.advantages > 0, self.config.temperature_positive)
        return -tokens.advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, None


class GMPOLossFn(PolicyGradientLossFn):
    """-A · (the product of the clipped ratios of the sequence)^(1 / its length), averaged over sequences.

    log r is clipped from above at `log_ratio_clip_max` if A > 0, and from below at -`log_ratio_clip_min` if A < 0; a clipped
    token has no gradient. Each token has its own advantage; the paper has one per sequence, for which this is the same.
    """

    needs_advantages: ClassVar[bool] = True
    config: GMPOLossConfig

    def _ratio(self, tokens: Tokens) -> torch.Tensor:
        clipped = tokens.log_ratio.masked_fill(self._above(tokens), self.config.log_ratio_clip_max)
        clipped = clipped.masked_fill(self._below(tokens), -self.config.log_ratio_clip_min)
        return sequence_ratio(clipped, tokens.mask)

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        return -tokens.advantages * ratio, self._above(tokens) | self._below(tokens)

    def _above(self, tokens: Tokens) -> torch.Tensor:
        return (tokens.advantages > 0) & (tokens.log_ratio > self.config.log_ratio_clip_max)

    def _below(self, tokens: Tokens) -> torch.Tensor:
        return (tokens.advantages < 0) & (tokens.log_ratio < -self.config.log_ratio_clip_min)


class VESPOLossFn(PolicyGradientLossFn):
    """-sg(w^k · exp(lambda (1 - w))) · A · log p, with w the product of the ratios of the sequence.

    k and lambda are those for A >= 0 or for A < 0. The weight is 1 for w = 1 and goes to 0 for w to 0 or to infinity. log w is
    clamped to plus and minus 20 nats.
    """

    needs_advantages: ClassVar[bool] = True
    config: VESPOLossConfig

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        config = self.config
        log_w = row_sums(tokens.log_ratio.detach(), tokens.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).unsqueeze(-1)
        positive = (config.k_positive * log_w + config.lambda_positive * (1.0 - log_w.exp())).exp()
        negative = (config.k_negative * log_w + config.lambda_negative * (1.0 - log_w.exp())).exp()
        weight = torch.where(tokens.advantages >= 0, positive, negative)
        return -weight * tokens.advantages * tokens.logprobs, None


class GSPOSequenceLossFn(ClippedPGLossFn):
    """GSPO with one advantage per sequence, the mean of those of its tokens, so that a sequence is clipped as a whole.

    GSPO-token, the loss `gspo`, clips by the advantage of each token. The two are equal if the tokens of a sequence have one
    advantage. They differ with advantages per turn or per token, and with a KL penalty in the reward of `reinforce_plus_plus`.
    """

    needs_advantages: ClassVar[bool] = True

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        of_row = row_means(tokens.advantages, tokens.mask).unsqueeze(-1).expand_as(ratio)
        return super()._surrogate(replace(tokens, advantages=of_row), ratio)


class HighCovarianceLossFn(PolicyGradientLossFn):
    """Base of losses that treat tokens of high covariance separately.

    The covariance of a token is (A - mean A) · (log p - mean log p), with means over the trained tokens of a step. It is
    computed once per step, for all its optimizer steps, from the log-probabilities before the step, or from those of the
    sampler if there is no scoring pass. So microbatches, ranks and packing do not change which tokens are selected. The
    authors' code computes it in each microbatch, from the current policy.
    """

    @property
    def required_keys(self) -> frozenset[str]:
        """Those of a policy gradient, and `high_covariance`, which `batch_columns` computes."""
        return super().required_keys | {_HIGH_COVARIANCE}

    def batch_columns(self, data: BatchedDataDict[Any]) -> Mapping[str, torch.Tensor]:
        """`high_covariance` [B, T] float32: 1 on the selected tokens, else 0."""
        trained = data["token_mask"] * data["sample_mask"].unsqueeze(-1) > 0
        compared = data["prev_logprobs" if "prev_logprobs" in super().required_keys else "generation_logprobs"]
        marked = torch.zeros_like(data["token_mask"])
        if bool(trained.any()):
            factors = [column[trained].double() for column in (data["advantages"], compared)]
            covariance = (factors[0] - factors[0].mean()) * (factors[1] - factors[1].mean())
            marked[trained] = marked[trained].index_fill(0, self._select(covariance, data), 1.0)
        return {_HIGH_COVARIANCE: marked}

    @abstractmethod
    def _select(self, covariance: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
        """Indices of the selected ones among the trained tokens [N], from their covariance [N] float64."""


class ClipCovLossFn(HighCovarianceLossFn, ClippedPGLossFn):
    """The clipped loss, and 0 for `clip_cov_fraction` of the tokens, drawn from those with a covariance within the bounds.

    The draw depends only on the tokens of the step, so a resumed run draws the same.
    """

    needs_advantages: ClassVar[bool] = True
    config: ClipCovLossConfig

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        loss, clipped = super()._surrogate(tokens, ratio)
        selected = tokens.data[_HIGH_COVARIANCE] > 0
        return torch.where(selected, 0.0, loss), selected if clipped is None else selected | clipped

    def _select(self, covariance: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
        within = (covariance > self.config.clip_cov_min) & (covariance < self.config.clip_cov_max)
        candidates = within.nonzero().flatten()
        seed = zlib.crc32(data["input_ids"].contiguous().numpy().tobytes())
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        return candidates[order[: _count(self.config.clip_cov_fraction, covariance)]]


class KLCovLossFn(HighCovarianceLossFn):
    """-A · r, plus `kl_cov_penalty` · |log r| for the `kl_cov_fraction` of the tokens with the highest covariance.

    |log r| is the estimate of KL(q || p) in the authors' code. It has no gradient at r = 1, so the penalty only has an effect
    if a step makes several optimizer steps, or with `ratio_to: sampler`.
    """

    config: KLCovLossConfig

    def _surrogate(self, tokens: Tokens, ratio: torch.Tensor) -> _Term:
        selected = tokens.data[_HIGH_COVARIANCE] > 0
        penalty = self.config.kl_cov_penalty * tokens.log_ratio.abs()
        return -tokens.advantages * ratio + torch.where(selected, penalty, 0.0), selected

    def _select(self, covariance: torch.Tensor, data: BatchedDataDict[Any]) -> torch.Tensor:
        return covariance.topk(_count(self.config.kl_cov_fraction, covariance)).indices


def _count(fraction: float, covariance: torch.Tensor) -> int:
    return max(1, int(fraction * len(covariance)))
