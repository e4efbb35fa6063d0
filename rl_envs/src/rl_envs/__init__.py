"""Environments of rlcore and their datasets. Importing this package loads neither torch nor math-verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.first_use import import_on_first_use

if TYPE_CHECKING:
    from rl_envs.arithmetic import ArithmeticDataset, ArithmeticEnvironment
    from rl_envs.code.environment import CodeEnvironment
    from rl_envs.guess import GuessNumberDataset, GuessNumberEnvironment
    from rl_envs.instruction_following import InstructionFollowingEnvironment
    from rl_envs.judge import JudgeEnvironment
    from rl_envs.math.environment import MathEnvironment
    from rl_envs.multiple_choice import MultipleChoiceEnvironment, ShortAnswerEnvironment
    from rl_envs.reasoning_gym.environment import ReasoningGymDataset, ReasoningGymEnvironment
    from rl_envs.reward_model import RewardModelEnvironment
    from rl_envs.sliding_puzzle import SlidingPuzzleDataset, SlidingPuzzleEnvironment
    from rl_envs.tools.environment import ToolsEnvironment
    from rl_envs.weather import WeatherEnvironment

__all__ = [
    "ArithmeticDataset",
    "ArithmeticEnvironment",
    "CodeEnvironment",
    "GuessNumberDataset",
    "GuessNumberEnvironment",
    "InstructionFollowingEnvironment",
    "JudgeEnvironment",
    "MathEnvironment",
    "MultipleChoiceEnvironment",
    "ReasoningGymDataset",
    "ReasoningGymEnvironment",
    "RewardModelEnvironment",
    "ShortAnswerEnvironment",
    "SlidingPuzzleDataset",
    "SlidingPuzzleEnvironment",
    "ToolsEnvironment",
    "WeatherEnvironment",
]

__getattr__ = import_on_first_use(__name__)
