"""The sections of our environments and datasets; imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.config.schema import DatasetConfig, EnvironmentConfig


class MathEnvironmentConfig(EnvironmentConfig):
    """`env.math`: answers compared by math-verify."""

    timeout_s: float = Field(default=5.0, gt=0.0)
    """Longest comparison of one answer; its process is then killed and the answer counted wrong."""
    num_processes: int = Field(default=1, ge=1)
    """Comparing processes in each worker."""
    require_box: bool = False
    """Read only `\\boxed{}`; without it the last number or expression counts as well."""


class ArithmeticEnvironmentConfig(EnvironmentConfig):
    """`env.arithmetic`: the completion's text must be the number."""

    format_reward: float = Field(default=0.0, ge=0.0)
    """Added where the completion is a whole number, right or wrong."""


class ArithmeticDatasetConfig(DatasetConfig):
    """Generated arithmetic: `a + b =` with as many digits as asked."""

    dataset_name: str = "arithmetic"
    num_samples: int = Field(default=4096, ge=1)
    """Records."""
    operations: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """What is drawn from, evenly."""
    min_digits: int = Field(default=1, ge=1, le=9)
    """Fewest digits of an operand."""
    max_digits: int = Field(default=2, ge=1, le=9)
    """Most digits of an operand."""
    seed: int = 0
    """Record i is a function of the seed and i."""
    style: Literal["plain", "chat"] = "plain"
    """`plain` is the bare `12+34=`; `chat` asks in words and wants the answer in a box."""
    with_response: bool = False
    """Add the right answer as the assistant's message, for supervised training."""
