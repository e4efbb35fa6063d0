"""Environments of rlcore and their datasets. Importing this package loads neither torch nor math-verify."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_envs.arithmetic.dataset import ArithmeticDataset
    from rl_envs.arithmetic.environment import ArithmeticEnvironment
    from rl_envs.code.environment import CodeEnvironment
    from rl_envs.guess.dataset import GuessNumberDataset
    from rl_envs.guess.environment import GuessNumberEnvironment
    from rl_envs.instruction_following.environment import InstructionFollowingEnvironment
    from rl_envs.judge.environment import JudgeEnvironment
    from rl_envs.math.environment import MathEnvironment
    from rl_envs.reasoning_gym.dataset import ReasoningGymDataset
    from rl_envs.reasoning_gym.environment import ReasoningGymEnvironment
    from rl_envs.reward_model.environment import RewardModelEnvironment
    from rl_envs.sliding_puzzle.dataset import SlidingPuzzleDataset
    from rl_envs.sliding_puzzle.environment import SlidingPuzzleEnvironment
    from rl_envs.tools.environment import ToolsEnvironment
    from rl_envs.weather.environment import WeatherEnvironment

__all__ = [
    "ArithmeticDataset",
    "ArithmeticEnvironment",
    "CodeEnvironment",
    "GuessNumberDataset",
    "GuessNumberEnvironment",
    "InstructionFollowingEnvironment",
    "JudgeEnvironment",
    "MathEnvironment",
    "ReasoningGymDataset",
    "ReasoningGymEnvironment",
    "RewardModelEnvironment",
    "SlidingPuzzleDataset",
    "SlidingPuzzleEnvironment",
    "ToolsEnvironment",
    "WeatherEnvironment",
]

_MODULES = {
    "ArithmeticDataset": "rl_envs.arithmetic.dataset",
    "ArithmeticEnvironment": "rl_envs.arithmetic.environment",
    "CodeEnvironment": "rl_envs.code.environment",
    "GuessNumberDataset": "rl_envs.guess.dataset",
    "GuessNumberEnvironment": "rl_envs.guess.environment",
    "InstructionFollowingEnvironment": "rl_envs.instruction_following.environment",
    "JudgeEnvironment": "rl_envs.judge.environment",
    "MathEnvironment": "rl_envs.math.environment",
    "ReasoningGymDataset": "rl_envs.reasoning_gym.dataset",
    "ReasoningGymEnvironment": "rl_envs.reasoning_gym.environment",
    "RewardModelEnvironment": "rl_envs.reward_model.environment",
    "SlidingPuzzleDataset": "rl_envs.sliding_puzzle.dataset",
    "SlidingPuzzleEnvironment": "rl_envs.sliding_puzzle.environment",
    "ToolsEnvironment": "rl_envs.tools.environment",
    "WeatherEnvironment": "rl_envs.weather.environment",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
