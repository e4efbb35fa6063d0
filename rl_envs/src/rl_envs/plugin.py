"""Registers the environments and their data; strings only, so it imports no torch and no verifier."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_environments() -> list[Component]:
    """Mathematics, arithmetic, a game of several turns, and a trained judge."""
    return [
        Component(
            "math",
            target="rl_envs.math.environment:MathEnvironment",
            config="rl_envs.config:MathEnvironmentConfig",
            summary="Mathematics: the boxed answer must equal the expected one, compared symbolically in processes of its own",
        ),
        Component(
            "arithmetic",
            target="rl_envs.arithmetic.environment:ArithmeticEnvironment",
            config="rl_envs.config:ArithmeticEnvironmentConfig",
            summary="Generated sums: the exact number is right",
        ),
        Component(
            "guess",
            target="rl_envs.guess.environment:GuessNumberEnvironment",
            config="rl_envs.config:GuessNumberEnvironmentConfig",
            summary="A number game of several turns: higher, lower, until the secret number is hit",
        ),
        Component(
            "reward_model",
            target="rl_envs.reward_model.environment:RewardModelEnvironment",
            config="rl_envs.config:RewardModelEnvironmentConfig",
            summary="Scores of a model that was trained on preferences",
            needs=("transformers>=5.16.1,<5.20",),
            install="pip install 'rl-envs[reward-model]'",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Generated arithmetic, and secret numbers."""
    return [
        Component(
            "arithmetic",
            target="rl_envs.arithmetic.dataset:ArithmeticDataset",
            config="rl_envs.config:ArithmeticDatasetConfig",
            summary="Generated sums with their answers, from a seed",
        ),
        Component(
            "guess",
            target="rl_envs.guess.dataset:GuessNumberDataset",
            config="rl_envs.config:GuessNumberDatasetConfig",
            summary="Secret numbers for the game `guess`, from a seed",
        ),
    ]
