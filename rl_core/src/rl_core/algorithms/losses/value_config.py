"""The section of the loss of a critic, `ppo.value_loss`; imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config.schema import LossConfig


class MseValueLossConfig(LossConfig):
    """How far the critic's values are from the returns, and how far they may move in one step."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    cliprange_value: float | None = Field(default=0.2, gt=0.0)
    """A value earns nothing by moving further than this from what it was before the step, in units of reward; null lets it
    move freely."""
