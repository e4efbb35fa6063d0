"""What is done to rewards before they are compared, and to advantages before they are trained on; it knows no policy."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.config.schema import RunConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig, RewardScalingConfig

OVERLONG = "overlong"
"""The part of a reward that is the punishment for length."""


def scale_rewards(rewards: torch.Tensor, config: RewardScalingConfig) -> torch.Tensor:
    """Rewards [B] mapped evenly from the source range to the target range; those outside are held at its ends."""
    share = (rewards.clamp(config.source_min, config.source_max) - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def overlong_punishment(lengths: torch.Tensor, *, limit: int, buffer: int, penalty: float) -> torch.Tensor:
    """The soft punishment of DAPO: 0 up to `limit - buffer` tokens, then evenly down to `-penalty` at the limit and beyond.

    Source: https://arxiv.org/abs/2503.14476, equation 13.

    Args:
        lengths: [B] sampled tokens.
        limit: most tokens of an answer.
        buffer: tokens before the limit where it begins.
        penalty: what an answer at the limit loses.
    """
    beyond = (lengths.float() - (limit - buffer)) / buffer
    return -penalty * beyond.clamp(0.0, 1.0)


class RewardShaping:
    """Replaces the `rewards` of a batch by what a run's config makes of them.

    Args:
        config: the algorithm's section.
        run: the whole config, for the length limit.
    """

    def __init__(self, config: PolicyGradientConfig, run: RunConfig) -> None:
        self._scaling, self._shaping = config.reward_scaling, config.reward_shaping
        generation = run.policy.generation
        self._limit = self._shaping.max_response_length or (generation.max_new_tokens if generation is not None else 0)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Shape `rewards` [B] and `reward_parts` in place; returns metrics, none where nothing is to be shaped."""
        metrics: dict[str, float] = {}
        rewards = batch["rewards"]
        if self._scaling.enabled:
            outside = (rewards < self._scaling.source_min) | (rewards > self._scaling.source_max)
            metrics["reward/clipped_frac"] = float(outside.float().mean())
            rewards = scale_rewards(rewards, self._scaling)
        if self._shaping.enabled:
            punishment = overlong_punishment(
                batch["token_mask"].sum(-1),
                limit=self._limit,
                buffer=self._shaping.overlong_buffer_length,
                penalty=self._shaping.overlong_buffer_penalty,
            )
            metrics["reward/overlong"] = float(punishment.mean())
            rewards = rewards + punishment
            batch["reward_parts"] = [
                {**parts, OVERLONG: float(lost)} for parts, lost in zip(batch["reward_parts"], punishment, strict=True)
            ]
        if metrics:
            metrics["reward/shaped"] = float(rewards.mean())
            batch["rewards"] = rewards
        return metrics


def clip_advantages(
    values: torch.Tensor, mask: torch.Tensor, config: PolicyGradientConfig
) -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages [B, T] within `advantage_clip_low` and `advantage_clip_high`, and the share of trained tokens held."""
    low, high = config.advantage_clip_low, config.advantage_clip_high
    if low is None and high is None:
        return values, {}
    clipped = values.clamp(low, high)
    held = ((clipped != values) & (mask > 0)).sum() / (mask > 0).sum().clamp(min=1)
    return clipped, {"advantage/clipped_frac": float(held)}
