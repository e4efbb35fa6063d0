"""Scales and shapes rewards, and clips advantages."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig, RewardScalingConfig
from rl_train.config.schema import RunConfig

OVERLONG = "overlong"
"""Name of the length penalty among the components of a reward."""


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """Rewards [B] mapped linearly from the source range to the target range; those outside are clipped."""
    fraction = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / (
        config.source_max - config.source_min
    )
    return config.target_min + fraction * (config.target_max - config.target_min)


def overlong_penalty(lengths: torch.Tensor, *, limit: int, buffer: int, penalty: float) -> torch.Tensor:
    """DAPO's soft overlong penalty: 0 up to `limit - buffer` tokens, then linear to `-penalty` at the limit and beyond.

    Source: https://arxiv.org/abs/2503.14476, equation 13.

    Args:
        lengths: [B] number of sampled tokens.
        limit: maximum number of tokens of an answer.
        buffer: number of tokens before the limit at which it starts.
        penalty: penalty of an answer at the limit.
    """
    beyond = (lengths.float() - (limit - buffer)) / buffer
    return -penalty * beyond.clamp(0.0, 1.0)


class RewardShaping:
    """Scales and shapes the `rewards` of a batch by the run's config.

    Args:
        config: the algorithm's section.
        run: the whole config, for the length limit.
    """

    def __init__(self, config: PolicyGradientConfig, run: RunConfig) -> None:
        self._scaling, self._shaping = config.reward_scaling, config.reward_shaping
        generation = run.policy.generation
        self._limit = self._shaping.max_response_length or (generation.max_new_tokens if generation is not None else 0)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Shape `rewards` [B] and `reward_parts` in place; returns metrics, none if nothing is enabled."""
        metrics: dict[str, float] = {}
        rewards = batch["rewards"]
        if self._scaling.enabled:
            outside = (rewards < self._scaling.source_min) | (rewards > self._scaling.source_max)
            metrics["reward/clipped_frac"] = float(outside.float().mean())
            rewards = scale_rewards(rewards, self._scaling)
        if self._shaping.enabled:
            length_penalty = overlong_penalty(
                batch["token_mask"].sum(-1),
                limit=self._limit,
                buffer=self._shaping.overlong_buffer_length,
                penalty=self._shaping.overlong_buffer_penalty,
            )
            metrics["reward/overlong"] = float(length_penalty.mean())
            rewards = rewards + length_penalty
            batch["reward_parts"] = [
                {**parts, OVERLONG: float(amount)} for parts, amount in zip(batch["reward_parts"], length_penalty, strict=True)
            ]
        if metrics:
            scored = batch["scored"] if "scored" in batch else torch.ones_like(rewards, dtype=torch.bool)
            metrics["reward/shaped"] = float(rewards[scored].mean()) if bool(scored.any()) else 0.0
            batch["rewards"] = rewards
        return metrics


def clip_advantages(
    values: torch.Tensor, mask: torch.Tensor, config: PolicyGradientConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages [B, T] clipped to `advantage_clip_low` and `advantage_clip_high`, and the fraction of clipped tokens."""
    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is None and high is None:
        return values, {}
    clipped = values.clamp(low, high)
    clipped_frac = ((clipped != values) & (mask > 0)).sum() / (mask > 0).sum().clamp(min=1)
    return clipped, {"advantage/clipped_frac": float(clipped_frac)}
