"""The sections `loss_fn` of the losses in `trust_regions.py`. Does not import torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_train.algorithms.losses.config import ClippedPGLossConfig, PolicyGradientLossConfig


class DPPOLossConfig(PolicyGradientLossConfig):
    """Policy-gradient loss of DPPO: tokens whose probability has moved too far train no further in that direction."""

    divergence: Literal["tv", "kl"] = "tv"
    """How far the probability of a token has moved, counting all other tokens as one: the total variation distance, or the KL
    divergence."""
    divergence_max_below: float | None = Field(default=None, ge=0.0)
    """Largest divergence at which a token with a negative advantage still loses probability. By default 0.15 for `tv` and 0.05
    for `kl`, as in the paper."""
    divergence_max_above: float | None = Field(default=None, ge=0.0)
    """Largest divergence at which a token with a positive advantage still gains probability; same defaults."""
    log_ratio_penalty: float = Field(default=0.0, ge=0.0)
    """Weight of the squared log-ratio of each token, which keeps the policy near the one it is compared with; 0.001 in
    prime-rl."""
    ratio_to: Literal["policy", "sampler"] = "sampler"
    """What the importance ratio and the divergence compare the current policy with: `sampler`, the log-probabilities that the
    engine returned, as in the paper, or `policy`, the policy before the step."""

    @property
    def divergence_bounds(self) -> tuple[float, float]:
        """`divergence_max_below` and `divergence_max_above`, or their defaults."""
        default = {"tv": 0.15, "kl": 0.05}[self.divergence]
        low, high = self.divergence_max_below, self.divergence_max_above
        return default if low is None else low, default if high is None else high


class SAPOLossConfig(PolicyGradientLossConfig):
    """Policy-gradient loss of SAPO: a sigmoid of the ratio instead of a clip, so that gradients fade smoothly."""

    temperature_positive: float = Field(default=1.0, gt=0.0)
    """Temperature of the sigmoid for tokens with a positive advantage. The larger, the sooner gradients fade."""
    temperature_negative: float = Field(default=1.05, gt=0.0)
    """Temperature of the sigmoid for other tokens, whose gradients should fade sooner."""
    token_level_loss: bool = False
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""


class GMPOLossConfig(PolicyGradientLossConfig):
    """Policy-gradient loss of GMPO: the geometric mean of the clipped ratios of a sequence."""

    log_ratio_clip_min: float = Field(default=0.4, ge=0.0)
    """The logarithm of a token's ratio is clipped from below at minus this value, if its advantage is negative."""
    log_ratio_clip_max: float = Field(default=0.4, ge=0.0)
    """The logarithm of a token's ratio is clipped from above at this value, if its advantage is positive."""
    token_level_loss: bool = False
    """Must be false: the loss is a mean over sequences."""

    @property
    def sequence_level_key(self) -> str | None:
        return "name"

    @model_validator(mode="after")
    def _counts_sequences(self) -> Self:
        if self.token_level_loss:
            raise ValueError(
                "gmpo has one ratio per sequence, but a mean over tokens would weight them by their length: remove "
                "token_level_loss"
            )
        return self


class VESPOLossConfig(PolicyGradientLossConfig):
    """Policy-gradient loss of VESPO: a smooth function of the ratio of the whole sequence weights its tokens."""

    k_positive: float = Field(default=2.0, ge=0.0)
    """Exponent k of the weight w^k exp(lambda (1 - w)) of a token with an advantage of at least 0; w is the ratio of the
    sequence."""
    lambda_positive: float = Field(default=3.0, gt=0.0)
    """Lambda of this weight."""
    k_negative: float = Field(default=3.0, ge=0.0)
    """Exponent k for tokens with a negative advantage."""
    lambda_negative: float = Field(default=2.0, gt=0.0)
    """Lambda for tokens with a negative advantage."""

    @property
    def sequence_level_key(self) -> str | None:
        return "name"

    @model_validator(mode="after")
    def _corrects_by_the_ratio(self) -> Self:
        if self.use_importance_sampling_correction:
            raise ValueError(
                "use_importance_sampling_correction weights single tokens, but vespo weights whole sequences: remove it, and "
                "set ratio_to: sampler to correct for the sampler"
            )
        return self


class ClipCovLossConfig(ClippedPGLossConfig):
    """Clipped policy-gradient loss of Clip-Cov: some tokens of high covariance have no gradient, which keeps the entropy up."""

    ratio_clip_min: float = Field(default=1.0, ge=0.0, le=1.0)
    """The importance ratio is clipped from below at 1 minus this value."""
    ratio_clip_max: float = Field(default=1.0, ge=0.0)
    """The importance ratio is clipped from above at 1 plus this value."""
    clip_cov_fraction: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Fraction of the trained tokens of a step that have no gradient, at least one token. They are drawn from those within the
    bounds."""
    clip_cov_min: float = 1.0
    """Lower bound of the covariance of these tokens: the product of the centered advantage and the centered
    log-probability."""
    clip_cov_max: float = 5.0
    """Upper bound of their covariance."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.clip_cov_min >= self.clip_cov_max:
            raise ValueError(f"clip_cov_min ({self.clip_cov_min}) must be below clip_cov_max ({self.clip_cov_max})")
        return self


class KLCovLossConfig(PolicyGradientLossConfig):
    """Policy-gradient loss of KL-Cov: the tokens of highest covariance have a KL penalty, which keeps the entropy up."""

    kl_cov_fraction: float = Field(default=2e-3, gt=0.0, le=1.0)
    """Fraction of the trained tokens of a step that have a penalty, at least one token: those of highest covariance. The paper
    uses 0.002 for a model of 7B parameters and 0.0002 for 32B."""
    kl_cov_penalty: float = Field(default=1.0, gt=0.0)
    """Weight of the absolute log-ratio of these tokens."""
