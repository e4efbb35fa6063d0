"""The section of the loss of a critic, `ppo.value_loss`. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_train.config.schema import LossConfig


class MseValueLossConfig(LossConfig):
    """Mean squared error between the critic's values and the returns, with optional clipping."""

    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    cliprange_value: float | None = Field(default=0.2, gt=0.0)
    """Clip range of a value around its value before the step, in units of reward. null disables clipping."""
