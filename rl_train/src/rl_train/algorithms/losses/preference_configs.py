"""The sections `loss_fn` of losses on preferences and labels of answers. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rl_train.config.schema import LossConfig


class PreferenceLossConfig(LossConfig):
    """Base section of every preference loss."""

    preference_loss_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the preference loss."""
    sft_loss_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen answers."""
    sft_average_log_probs: bool = True
    """Whether that likelihood is averaged over the tokens of an answer instead of summed."""

    @model_validator(mode="after")
    def _has_a_loss(self) -> PreferenceLossConfig:
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError(
                "preference_loss_weight and sft_loss_weight are both 0, so there is nothing to minimize: set one of them"
            )
        return self


class ReferenceLossConfig(PreferenceLossConfig):
    """Base section of the preference losses that compare the policy with a reference policy."""

    preference_average_log_probs: bool = False
    """Whether log-probabilities are averaged over the tokens of an answer instead of summed."""

    @property
    def needs_reference(self) -> bool:
        return True


class DPOLossConfig(ReferenceLossConfig):
    """Direct preference optimization (DPO)."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Beta: strength of the penalty for deviating from the reference policy, and the reward per nat of log-probability."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed fraction of pairs with swapped labels (conservative DPO)."""


class IPOLossConfig(ReferenceLossConfig):
    """Identity preference optimization (IPO), which trains the margin towards a finite value."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Tau: the log-ratios of a pair are trained towards a difference of 1 / (2 tau) nats."""


class HingeLossConfig(ReferenceLossConfig):
    """Hinge loss on the DPO margin: pairs with a margin above 1 have no gradient."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Beta: the reward per nat of log-probability."""


class SimPOLossConfig(PreferenceLossConfig):
    """Simple preference optimization (SimPO): mean log-probabilities, a margin, no reference policy."""

    beta: float = Field(default=2.0, gt=0.0)
    """Reward per nat of mean log-probability."""
    gamma: float = Field(default=1.0, ge=0.0)
    """Target margin of the chosen answer's reward over the rejected one's."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed fraction of pairs with swapped labels."""


class ORPOLossConfig(PreferenceLossConfig):
    """Odds-ratio preference optimization (ORPO): likelihood of the chosen answer and its odds ratio to the rejected one."""

    preference_loss_weight: float = Field(default=0.1, ge=0.0)
    """Lambda: weight of the odds-ratio loss."""
    sft_loss_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen answers."""


class KTOLossConfig(LossConfig):
    """Kahneman-Tversky optimization (KTO), on answers with a label."""

    reference_policy_kl_penalty: float = Field(default=0.1, gt=0.0)
    """Beta: strength of the penalty for deviating from the reference policy, and the reward per nat of log-probability."""
    desirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of desirable answers. If one class is rarer, raise its weight until weight times number of answers is similar for
    both."""
    undesirable_weight: float = Field(default=1.0, gt=0.0)
    """Weight of undesirable answers."""

    @property
    def needs_reference(self) -> bool:
        return True


class BradleyTerryLossConfig(LossConfig):
    """Bradley-Terry loss: negative log-likelihood of the preferences under the scores of the answers."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    centring_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of a pair's scores, which keeps their mean near 0. 0.01 is usual; 0 disables it."""
