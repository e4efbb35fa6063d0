"""The section `loss_fn` of the core's own losses; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_core.config.schema import LossConfig


class NLLLossConfig(LossConfig):
    """Supervised training: the mean negative log-likelihood of the trained tokens."""


class ClippedPGLossConfig(LossConfig):
    """The clipped policy gradient, with an optional penalty to the reference policy."""

    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The importance ratio is held above 1 minus it."""
    ratio_clip_max: float = Field(default=0.2, ge=0.0)
    """The importance ratio is held below 1 plus it."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: where the advantage is negative, the loss is at most it times the advantage's size."""
    disable_ppo_ratio: bool = False
    """REINFORCE: advantage times log-probability, with neither ratio nor clip."""
    token_level_loss: bool = True
    """A mean over all tokens; else a mean of each sequence's own mean."""
    reference_policy_kl_penalty: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the reference policy; 0 asks no reference to be kept."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0.0)
    """The log-ratio of the KL estimate is held within plus and minus it."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0.0)
    """The KL estimate of a token is held within plus and minus it."""
    use_importance_sampling_correction: bool = False
    """Weigh each token by how likelier the training backend finds it than the sampler did."""
    importance_sampling_max: float = Field(default=2.0, gt=0.0)
    """That weight is held below it (truncated importance sampling)."""

    @model_validator(mode="after")
    def _k1_teaches_nothing(self) -> ClippedPGLossConfig:
        if self.reference_policy_kl_penalty > 0 and self.reference_policy_kl_type == "k1":
            raise ValueError(
                "reference_policy_kl_type k1 has an expected gradient of zero when it is part of the loss: use k2 or k3"
            )
        return self

    @model_validator(mode="after")
    def _reinforce_has_no_clip(self) -> ClippedPGLossConfig:
        if self.disable_ppo_ratio and self.ratio_clip_c is not None:
            raise ValueError("disable_ppo_ratio leaves no ratio for ratio_clip_c to clip: remove one of them")
        return self
