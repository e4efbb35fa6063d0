"""The section `loss_fn` of the reward model loss. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_train.config.schema import LossConfig


class BradleyTerryLossConfig(LossConfig):
    """Bradley-Terry loss: negative log-likelihood of the preferences under the scores of the answers."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    centring_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of a pair's scores, which keeps their mean near 0. 0.01 is usual; 0 disables it."""
