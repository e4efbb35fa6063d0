"""The section `loss_fn` of the loss of a reward model; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config.schema import LossConfig


class BradleyTerryLossConfig(LossConfig):
    """The likelihood of preferences under scores of the answers."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    centring_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of a pair's scores, which draws them to mean 0; 0.01 is usual, 0 leaves their level open."""
