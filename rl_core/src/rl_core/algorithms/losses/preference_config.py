"""The section `loss_fn` of the losses over pairs of a chosen and a rejected answer; imports no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl_core.config.schema import LossConfig


class PreferenceLossConfig(LossConfig):
    """What every loss over pairs has."""

    preference_loss_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the preference term."""
    sft_loss_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen answers."""
    sft_average_log_probs: bool = True
    """That likelihood is a mean over an answer's tokens; else their sum."""

    @model_validator(mode="after")
    def _something_to_minimise(self) -> PreferenceLossConfig:
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError("preference_loss_weight and sft_loss_weight are both 0: there is nothing to minimise")
        return self


class DPOLossConfig(PreferenceLossConfig):
    """Direct preference optimisation."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Beta: how much straying from the reference policy costs; also what a nat of log-probability is worth as a reward."""
    preference_average_log_probs: bool = False
    """An answer's log-probability is the mean over its tokens; else their sum."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """The share of pairs whose labels may be the wrong way round (conservative DPO)."""


class IPOLossConfig(PreferenceLossConfig):
    """Identity preference optimisation: the margin is drawn to a number, not to infinity."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Tau: the log-ratios of a pair are drawn to differ by 1 / (2 tau) nats."""
    preference_average_log_probs: bool = False
    """An answer's log-probability is the mean over its tokens; else their sum."""


class HingeLossConfig(PreferenceLossConfig):
    """The hinge on DPO's margin: pairs told apart by more than 1 teach nothing more."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Beta: what a nat of log-probability is worth as a reward."""
    preference_average_log_probs: bool = False
    """An answer's log-probability is the mean over its tokens; else their sum."""


class SimPOLossConfig(PreferenceLossConfig):
    """Simple preference optimisation: mean log-probabilities, a margin, no reference policy."""

    beta: float = Field(default=2.0, gt=0.0)
    """What a nat of mean log-probability is worth as a reward."""
    gamma: float = Field(default=1.0, ge=0.0)
    """The margin by which the chosen answer's reward must lead."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """The share of pairs whose labels may be the wrong way round."""


class ORPOLossConfig(PreferenceLossConfig):
    """Odds-ratio preference optimisation: likelihood of the chosen answer, and its odds against the rejected one."""

    preference_loss_weight: float = Field(default=0.1, ge=0.0)
    """Lambda: weight of the odds-ratio term."""
    sft_loss_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen answers."""
