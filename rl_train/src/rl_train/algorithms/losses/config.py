"""The sections `loss_fn` of the built-in losses, and `ppo.value_loss`. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rl_core.config.schema import Section
from rl_train.config.schema import LossConfig

MAX_KL_ERROR = 0.2
"""The relative error of the KL is clipped to this fraction."""


class NLLLossConfig(LossConfig):
    """Supervised training: mean negative log-likelihood of the trained tokens."""


class AdaptiveKLConfig(Section):
    """Adaptive weight of the KL penalty (`loss_fn.adaptive_kl`)."""

    target: float = Field(gt=0.0)
    """Target KL of an answer to the reference policy, summed over its tokens, in nats."""
    horizon: int = Field(default=10_000, ge=1)
    """Number of answers over which the weight adapts: a step of n answers changes it by at most 20 % times n / horizon."""


class PolicyGradientLossConfig(LossConfig):
    """What all policy-gradient losses have: a mean, an optional KL penalty, and corrections for the sampler."""

    token_level_loss: bool = True
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""
    constant_length_normalizer: int | None = Field(default=None, ge=1)
    """Dr. GRPO: divide the sum over each sequence by this number of tokens instead of its length; usually the maximum
    length."""
    reference_policy_kl_penalty: float = Field(default=0.0, ge=0.0)
    """Weight of the KL penalty to the reference policy. With 0, no reference policy is kept."""
    use_kl_in_reward: bool = False
    """Whether to subtract the KL penalty from the reward of each token instead of adding it to the loss. The gradient is that
    of KL(policy, reference)."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL. k3, the default in the loss, has the gradient of KL(reference, policy); k2 that of KL(policy,
    reference), like k1, the default in the reward. k1 in the loss and k2 and k3 in the reward are rejected, because their
    gradients are wrong there."""
    adaptive_kl: AdaptiveKLConfig | None = None
    """Adapt the weight of a KL penalty in the reward after each step to reach a target KL; constant by default."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0.0, le=80.0)
    """Clamp the log-ratio of the KL estimate to plus and minus this value. With null, k3 still clamps it to 20."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0.0)
    """Clamp the KL estimate of a token to plus and minus this value. A clamped estimate has no gradient."""
    ratio_to: Literal["policy", "sampler"] = "policy"
    """What the importance ratio compares the current policy with: `policy`, the policy before the step, or `sampler`, the
    log-probabilities that the engine returned. `sampler` needs no scoring pass, and its ratio covers older weights too."""
    use_importance_sampling_correction: bool = False
    """Whether to weight each token by the ratio of its probability under the training backend, before the step, to that under
    the sampler. With `ratio_to: policy`, this is decoupled PPO."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """How weights out of bounds are handled: `tis` clips the weight to the bound, `icepop` drops the token, `seq-mask-tis`
    drops sequences whose geometric mean of weights is out of bounds."""
    truncated_importance_sampling_ratio: float = Field(default=2.0, gt=0.0)
    """Upper bound of a weight."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0.0)
    """Lower bound of a weight; none by default."""

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator in use: `reference_policy_kl_type`, or its default."""
        return self.reference_policy_kl_type or ("k1" if self.use_kl_in_reward else "k3")

    @property
    def needs_reference(self) -> bool:
        return self.reference_policy_kl_penalty > 0

    @property
    def corrects_for_older_weights(self) -> bool:
        return self.ratio_to == "sampler" or self.use_importance_sampling_correction

    @property
    def sequence_level_key(self) -> str | None:
        if not self.token_level_loss:
            return "token_level_loss"
        return "truncated_importance_sampling_type" if self.truncated_importance_sampling_type == "seq-mask-tis" else None

    @field_validator("reference_policy_kl_type")
    @classmethod
    def _kl_gradient_is_correct(cls, kl_type: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("use_kl_in_reward") and kl_type in ("k2", "k3"):
            raise ValueError(
                f"{kl_type} in the reward (use_kl_in_reward) has a wrong gradient, which raises the KL instead of lowering "
                "it. Use k1, the default there, or keep the penalty in the loss"
            )
        return kl_type

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.ratio_to == "sampler" and self.use_importance_sampling_correction:
            raise ValueError(
                "ratio_to: sampler includes the difference to the sampler in the importance ratio, and "
                "use_importance_sampling_correction would correct for it a second time: remove one of them"
            )
        if self.constant_length_normalizer is not None and self.token_level_loss:
            raise ValueError(
                "constant_length_normalizer divides the sum over each sequence, but token_level_loss averages over all "
                "tokens: set token_level_loss to false"
            )
        return self

    @model_validator(mode="after")
    def _penalty_has_effect(self) -> Self:
        if self.use_kl_in_reward and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "use_kl_in_reward has no effect while reference_policy_kl_penalty is 0: set reference_policy_kl_penalty"
            )
        if self.adaptive_kl is not None and not self.use_kl_in_reward:
            raise ValueError(
                "adaptive_kl adapts the weight of a KL penalty in the reward, but there is none: set use_kl_in_reward, and "
                "reference_policy_kl_penalty, which is the initial weight"
            )
        in_loss = self.reference_policy_kl_penalty > 0 and not self.use_kl_in_reward
        if in_loss and self.kl_estimator == "k1":
            raise ValueError(
                "reference_policy_kl_type k1 has an expected gradient of zero in the loss: use k2 or k3, or use_kl_in_reward"
            )
        return self

    @model_validator(mode="after")
    def _bounds_have_effect(self) -> Self:
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if not self.use_importance_sampling_correction and (kind != "tis" or low is not None):
            raise ValueError("truncated_importance_sampling_* has no effect without use_importance_sampling_correction: set it")
        if low is not None and low >= high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min ({low}) must be below truncated_importance_sampling_ratio ({high}): "
                "otherwise no weight is within the bounds"
            )
        if kind != "tis" and low is None:
            raise ValueError(
                f"truncated_importance_sampling_type {kind} also needs a lower bound: set "
                "truncated_importance_sampling_ratio_min (0.5 is usual)"
            )
        return self


class ClippedPGLossConfig(PolicyGradientLossConfig):
    """Clipped policy-gradient loss with optional KL penalty and correction for numerical differences to the sampler."""

    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The importance ratio is clipped from below at 1 minus this value."""
    ratio_clip_max: float = Field(default=0.2, ge=0.0)
    """The importance ratio is clipped from above at 1 plus this value."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: for negative advantages, the loss is at most this value times the absolute advantage. Disabled by default."""
    disable_ppo_ratio: bool = False
    """REINFORCE: advantage times log-probability, without ratio and clipping."""
    use_cispo: bool = False
    """CISPO: use the clipped ratio as a weight without a gradient, so that clipping does not remove the gradient of any
    token."""
    sequence_level_importance_ratios: bool = False
    """GSPO: use one ratio per sequence, the geometric mean of the ratios of its tokens."""

    @model_validator(mode="after")
    def _check_surrogate(self) -> Self:
        if self.disable_ppo_ratio:
            for key in ("ratio_clip_c", "use_cispo", "sequence_level_importance_ratios"):
                if getattr(self, key):
                    raise ValueError(f"disable_ppo_ratio removes the ratio that {key} needs: remove one of them")
            if self.ratio_to == "sampler":
                raise ValueError("disable_ppo_ratio removes the ratio, so ratio_to would have no effect: remove one of them")
        if self.use_cispo and self.ratio_clip_c is not None:
            raise ValueError("use_cispo bounds the ratio itself, so ratio_clip_c would have no effect: remove one of them")
        if self.use_cispo and self.sequence_level_importance_ratios:
            raise ValueError(
                "use_cispo weights tokens by their own ratios, but sequence_level_importance_ratios has one ratio per "
                "sequence: remove one of them"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(_ONE_RATIO.format("sequence_level_importance_ratios clips whole sequences"))
        return self


_ONE_RATIO: Final = "{}, but a mean over tokens would weight them by their length: set token_level_loss to false"


class GRPOLossConfig(ClippedPGLossConfig):
    """Clipped policy-gradient loss of the GRPO paper: mean of sequence means, and a KL penalty."""

    token_level_loss: bool = False
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""
    reference_policy_kl_penalty: float = Field(default=0.04, ge=0.0)
    """Weight of the KL penalty to the reference policy. With 0, no reference policy is kept."""


class DAPOLossConfig(ClippedPGLossConfig):
    """Clipped policy-gradient loss of DAPO: clip-higher and a mean over tokens."""

    ratio_clip_max: float = Field(default=0.28, ge=0.0)
    """The importance ratio is clipped from above at 1 plus this value."""


class DrGRPOLossConfig(ClippedPGLossConfig):
    """Clipped policy-gradient loss of Dr. GRPO: the sum over each sequence, divided by a constant."""

    token_level_loss: bool = False
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""
    constant_length_normalizer: int = Field(ge=1)
    """Divide the sum over each sequence by this number of tokens; usually `${policy.generation.max_new_tokens}`."""


class GSPOLossConfig(ClippedPGLossConfig):
    """Clipped policy-gradient loss of GSPO: one ratio per sequence, within narrow bounds."""

    ratio_clip_min: float = Field(default=3e-4, ge=0.0, le=1.0)
    """The importance ratio is clipped from below at 1 minus this value."""
    ratio_clip_max: float = Field(default=4e-4, ge=0.0)
    """The importance ratio is clipped from above at 1 plus this value."""
    sequence_level_importance_ratios: bool = True
    """GSPO: use one ratio per sequence, the geometric mean of the ratios of its tokens."""
    token_level_loss: bool = False
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""


class CISPOLossConfig(ClippedPGLossConfig):
    """Policy-gradient loss of CISPO: ratios are weights and are clipped only from above."""

    ratio_clip_min: float = Field(default=1.0, ge=0.0, le=1.0)
    """The importance ratio is clipped from below at 1 minus this value."""
    ratio_clip_max: float = Field(default=4.0, ge=0.0)
    """The importance ratio is clipped from above at 1 plus this value."""
    use_cispo: bool = True
    """CISPO: use the clipped ratio as a weight without a gradient, so that clipping does not remove the gradient of any
    token."""


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
            raise ValueError(_ONE_RATIO.format("gmpo averages over sequences"))
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


_HALF: Final = 0.5


class DistillationLossConfig(LossConfig):
    """Token-level divergence between student and teacher."""

    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    """`forward_kl`: KL(teacher, student), mode-covering; `reverse_kl`: KL(student, teacher), mode-seeking; `mixed_kl`: weighted
    mean of the two; `jsd`: generalized Jensen-Shannon divergence of GKD."""
    topk: int | None = Field(default=64, ge=1)
    """K: compute the divergence on the teacher's `topk` most likely tokens. null uses only the sampled token, by policy
    gradient, and requires `reverse_kl`."""
    beyond_topk: Literal["bucket", "renormalize"] = "bucket"
    """How tokens outside the top-k are treated. `bucket`: as one additional token, so that probability outside counts;
    `renormalize`: ignored."""
    mixed_kl_weight: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """For `mixed_kl`: weight of the forward KL. The reverse KL has one minus this weight."""
    jsd_beta: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """For `jsd`: weight of the teacher in the mixture. Near 0 it behaves like `forward_kl`, near 1 like `reverse_kl`."""
    token_level_loss: bool = True
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""

    @property
    def corrects_for_older_weights(self) -> bool:
        """Only a divergence of whole distributions does not depend on what sampled the tokens."""
        return self.topk is not None

    @property
    def num_candidates(self) -> int:
        return self.topk or 0

    @property
    def sequence_level_key(self) -> str | None:
        return None if self.token_level_loss else "token_level_loss"

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> DistillationLossConfig:
        if self.topk is None and self.divergence != "reverse_kl":
            raise ValueError(
                "topk null uses only the sampled tokens, which estimate the reverse KL and no other divergence: "
                f"{self.divergence} needs the teacher's most likely tokens. Set topk, or divergence: reverse_kl"
            )
        used = {
            "beyond_topk": self.topk is not None or self.beyond_topk == "bucket",
            "mixed_kl_weight": self.divergence == "mixed_kl" or self.mixed_kl_weight == _HALF,
            "jsd_beta": self.divergence == "jsd" or self.jsd_beta == _HALF,
        }
        for key, fits in used.items():
            if not fits:
                raise ValueError(f"divergence {self.divergence} with topk {self.topk} does not use {key}: remove it")
        if self.topk == 1 and self.beyond_topk == "renormalize":
            raise ValueError(
                "topk 1 with beyond_topk: renormalize has no signal, since a single renormalized token always "
                "has probability 1: raise topk, or use beyond_topk: bucket"
            )
        return self


class MseValueLossConfig(LossConfig):
    """Mean squared error between the critic's values and the returns, with optional clipping."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    cliprange_value: float | None = Field(default=0.2, gt=0.0)
    """Clip range of a value around its value before the step, in units of reward. null disables clipping."""
