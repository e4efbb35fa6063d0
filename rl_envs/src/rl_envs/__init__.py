"""Environments of rlcore and their datasets. Importing this package loads neither torch nor math-verify."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_envs.arithmetic.dataset import ArithmeticDataset
    from rl_envs.arithmetic.environment import ArithmeticEnvironment
    from rl_envs.guess.dataset import GuessNumberDataset
    from rl_envs.guess.environment import GuessNumberEnvironment
    from rl_envs.math.environment import MathEnvironment
    from rl_envs.reward_model.environment import RewardModelEnvironment

__all__ = [
    "ArithmeticDataset",
    "ArithmeticEnvironment",
    "GuessNumberDataset",
    "GuessNumberEnvironment",
    "MathEnvironment",
    "RewardModelEnvironment",
]

_MODULES = {
    "ArithmeticDataset": "rl_envs.arithmetic.dataset",
    "ArithmeticEnvironment": "rl_envs.arithmetic.environment",
    "GuessNumberDataset": "rl_envs.guess.dataset",
    "GuessNumberEnvironment": "rl_envs.guess.environment",
    "MathEnvironment": "rl_envs.math.environment",
    "RewardModelEnvironment": "rl_envs.reward_model.environment",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
