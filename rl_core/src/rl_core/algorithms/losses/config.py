"""The section `loss_fn` of the core's own losses; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rl_core.config.schema import LossConfig, Section

MOST_ERROR = 0.2
"""A KL further from its target than this share of it counts as so far."""


class NLLLossConfig(LossConfig):
    """Supervised training: the mean negative log-likelihood of the trained tokens."""


class AdaptiveKLConfig(Section):
    """A weight of the KL penalty that follows the KL (`loss_fn.adaptive_kl`)."""

    target: float = Field(gt=0.0)
    """The KL of an answer to the reference policy that is aimed at: summed over its tokens, in nats."""
    horizon: int = Field(default=10_000, ge=1)
    """A step of n answers changes the weight by at most 20 % times n / horizon."""


class ClippedPGLossConfig(LossConfig):
    """The clipped policy gradient, its ratios, its means, its KL penalty and its correction for the sampler's rounding."""

    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The importance ratio is held above 1 minus it."""
    ratio_clip_max: float = Field(default=0.2, ge=0.0)
    """The importance ratio is held below 1 plus it."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: where the advantage is negative, the loss is at most it times the advantage's size."""
    disable_ppo_ratio: bool = False
    """REINFORCE: advantage times log-probability, with neither ratio nor clip."""
    use_cispo: bool = False
    """CISPO: the clipped ratio is a weight without a gradient, so that no token's gradient is lost to the clip."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio a sequence, the geometric mean of its tokens' ratios."""
    token_level_loss: bool = True
    """A mean over all tokens; else a mean of each sequence's own mean."""
    constant_length_normalizer: int | None = Field(default=None, ge=1)
    """Dr. GRPO: divide each sequence's sum by so many tokens, not by its length; usually the most that it may have."""
    reference_policy_kl_penalty: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the reference policy; 0 asks no reference to be kept."""
    use_kl_in_reward: bool = False
    """Take the penalty from the reward of each token, not from the loss."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL; by default k3 in the loss and k1 in the reward. In the loss k1 is refused, in the reward k2 and k3:
    their gradients there are wrong."""
    adaptive_kl: AdaptiveKLConfig | None = None
    """Move the weight of a penalty in the reward after each step, towards a target KL; constant by default."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0.0, le=80.0)
    """Clamp the log-ratio of the KL estimate to plus and minus this value. With null, k3 still clamps it to 20."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0.0)
    """The KL estimate of a token is held within plus and minus it."""
    use_importance_sampling_correction: bool = False
    """Weigh each token by how likelier the training backend finds it than the sampler did."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """What happens to a weight out of bounds: `tis` holds it at the bound, `icepop` leaves the token out, `seq-mask-tis`
    leaves the sequence out whose geometric mean of weights is out of bounds."""
    truncated_importance_sampling_ratio: float = Field(default=2.0, gt=0.0)
    """Upper bound of a weight."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0.0)
    """Lower bound of a weight; none by default."""

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator in use: `reference_policy_kl_type`, or its default."""
        return self.reference_policy_kl_type or ("k1" if self.use_kl_in_reward else "k3")

    @field_validator("reference_policy_kl_type")
    @classmethod
    def _has_a_gradient_of_the_kl_in_the_reward(cls, kl_type: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("use_kl_in_reward") and kl_type in ("k2", "k3"):
            raise ValueError(
                f"{kl_type} in the reward (use_kl_in_reward) has a wrong gradient: following it raises the KL instead of "
                "lowering it. Use k1, the default there, or leave the penalty in the loss"
            )
        return kl_type

    @model_validator(mode="after")
    def _one_surrogate(self) -> ClippedPGLossConfig:
        if self.disable_ppo_ratio:
            for key in ("ratio_clip_c", "use_cispo", "sequence_level_importance_ratios"):
                if getattr(self, key):
                    raise ValueError(f"disable_ppo_ratio leaves no ratio for {key} to work on: remove one of them")
        if self.use_cispo and self.ratio_clip_c is not None:
            raise ValueError("use_cispo bounds the ratio itself, so ratio_clip_c would never act: remove one of them")
        if self.use_cispo and self.sequence_level_importance_ratios:
            raise ValueError(
                "use_cispo weighs tokens by their own ratios, and sequence_level_importance_ratios has none: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_mean(self) -> ClippedPGLossConfig:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios makes a sequence the unit of clipping, and a mean over tokens would weigh it "
                "by its length: set token_level_loss to false"
            )
        if self.constant_length_normalizer is not None and self.token_level_loss:
            raise ValueError(
                "constant_length_normalizer divides each sequence's sum, and a mean over tokens has none: set token_level_loss "
                "to false"
            )
        return self

    @model_validator(mode="after")
    def _a_penalty_that_acts(self) -> ClippedPGLossConfig:
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            raise ValueError("use_kl_in_reward takes nothing from any reward while reference_policy_kl_penalty is 0: set it")
        if self.adaptive_kl is not None and not self.use_kl_in_reward:
            raise ValueError(
                "adaptive_kl moves the weight of a penalty in the reward, and there is none: set use_kl_in_reward, and "
                "reference_policy_kl_penalty, which is the first weight"
            )
        in_loss = self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward
        if in_loss and self.kl_estimator == "k1":
            raise ValueError(
                "reference_policy_kl_type k1 has an expected gradient of zero when it is part of the loss: use k2 or k3, or "
                "use_kl_in_reward"
            )
        return self

    @model_validator(mode="after")
    def _bounds_that_act(self) -> ClippedPGLossConfig:
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if not self.use_importance_sampling_correction and (kind != "tis" or low is not None):
            raise ValueError("truncated_importance_sampling_* does nothing without use_importance_sampling_correction: set it")
        if low is not None and low >= high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min {low} is not below truncated_importance_sampling_ratio {high}: no "
                "weight would be within bounds"
            )
        if kind != "tis" and low is None:
            raise ValueError(
                f"truncated_importance_sampling_type {kind} leaves out what is below a lower bound as well: set "
                "truncated_importance_sampling_ratio_min (0.5 is usual)"
            )
        return self


class GRPOLossConfig(ClippedPGLossConfig):
    """The clipped policy gradient as the GRPO paper has it: a mean of sequence means, and a KL penalty."""

    token_level_loss: bool = False
    """A mean over all tokens; else a mean of each sequence's own mean."""
    reference_policy_kl_penalty: float = Field(default=0.04, ge=0.0)
    """Weight of the KL penalty to the reference policy; 0 asks no reference to be kept."""


class DAPOLossConfig(ClippedPGLossConfig):
    """The clipped policy gradient of DAPO: clip-higher and a mean over tokens."""

    ratio_clip_max: float = Field(default=0.28, ge=0.0)
    """The importance ratio is held below 1 plus it."""


class DrGRPOLossConfig(ClippedPGLossConfig):
    """The clipped policy gradient of Dr. GRPO: each sequence's sum, divided by one constant for all."""

    token_level_loss: bool = False
    """A mean over all tokens; else a mean of each sequence's own mean."""
    constant_length_normalizer: int = Field(ge=1)
    """Divide each sequence's sum by so many tokens; usually `${policy.generation.max_new_tokens}`."""


class GSPOLossConfig(ClippedPGLossConfig):
    """The clipped policy gradient of GSPO: one ratio a sequence, within narrow bounds."""

    ratio_clip_min: float = Field(default=3e-4, ge=0.0, le=1.0)
    """The importance ratio is held above 1 minus it."""
    ratio_clip_max: float = Field(default=4e-4, ge=0.0)
    """The importance ratio is held below 1 plus it."""
    sequence_level_importance_ratios: bool = True
    """GSPO: one ratio a sequence, the geometric mean of its tokens' ratios."""
    token_level_loss: bool = False
    """A mean over all tokens; else a mean of each sequence's own mean."""


class CISPOLossConfig(ClippedPGLossConfig):
    """The policy gradient of CISPO: ratios are weights, bounded above alone."""

    ratio_clip_min: float = Field(default=1.0, ge=0.0, le=1.0)
    """The importance ratio is held above 1 minus it."""
    ratio_clip_max: float = Field(default=4.0, ge=0.0)
    """The importance ratio is held below 1 plus it."""
    use_cispo: bool = True
    """CISPO: the clipped ratio is a weight without a gradient, so that no token's gradient is lost to the clip."""
