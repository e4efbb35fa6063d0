"""Registers the environments and datasets by import path, without importing torch or math-verify."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_environments() -> list[Component]:
    """Math, arithmetic, a multi-turn game and a reward model."""
    return [
        Component(
            "math",
            target="rl_envs.math.environment:MathEnvironment",
            config="rl_envs.config:MathEnvironmentConfig",
            summary="Math: the boxed answer must equal the expected one, compared symbolically in separate processes",
        ),
        Component(
            "arithmetic",
            target="rl_envs.arithmetic.environment:ArithmeticEnvironment",
            config="rl_envs.config:ArithmeticEnvironmentConfig",
            summary="Generated arithmetic: the completion must be exactly the number",
        ),
        Component(
            "guess",
            target="rl_envs.guess.environment:GuessNumberEnvironment",
            config="rl_envs.config:GuessNumberEnvironmentConfig",
            summary="A multi-turn game: guess a secret number with higher/lower hints",
        ),
        Component(
            "reward_model",
            target="rl_envs.reward_model.environment:RewardModelEnvironment",
            config="rl_envs.config:RewardModelEnvironmentConfig",
            summary="Scores of a reward model trained on preferences",
            needs=("transformers>=5.16.1,<5.20",),
            install="pip install 'rl-envs[reward-model]'",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Generated arithmetic and secret numbers."""
    return [
        Component(
            "arithmetic",
            target="rl_envs.arithmetic.dataset:ArithmeticDataset",
            config="rl_envs.config:ArithmeticDatasetConfig",
            summary="Generated arithmetic problems with answers",
        ),
        Component(
            "guess",
            target="rl_envs.guess.dataset:GuessNumberDataset",
            config="rl_envs.config:GuessNumberDatasetConfig",
            summary="Secret numbers for the environment `guess`",
        ),
    ]
