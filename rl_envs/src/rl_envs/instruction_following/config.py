"""The section of the environment `instruction_following`. Lightweight imports only."""

from __future__ import annotations

from typing import Literal

from rl_core.config.schema import EnvironmentConfig


class InstructionFollowingConfig(EnvironmentConfig):
    """`env.instruction_following`: a program checks constraints on the form of an answer."""

    reward: Literal["all", "fraction"] = "all"
    """Reward of an answer: 1.0 if it follows all instructions of its row and 0.0 otherwise, or the fraction that it follows."""
