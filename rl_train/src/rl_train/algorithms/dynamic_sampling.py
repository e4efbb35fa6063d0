"""Dynamic sampling: a step trains on informative groups only, https://arxiv.org/abs/2503.14476, section 3.2.

A group is informative if the environment's rewards differ within it (equation 11, for rewards of 0 and 1). Shaped rewards do
not count: a group without a correct answer would look informative because its answers differ in length. Groups are selected or
dropped as a whole, when they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.grpo_config import GRPOConfig
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig
from rl_train.rollouts.segments import join_segments, spread
from rl_train.rollouts.source import Rollouts, RolloutSource, Selection
from rl_train.rollouts.trajectory import Trajectory, to_batch

Batch = BatchedDataDict[Any]


def draw_rollouts(
    source: RolloutSource,
    step: int,
    *,
    config: GRPOConfig,
    shape: Callable[[Batch], dict[str, float]],
    is_informative: Callable[[Batch], torch.Tensor],
) -> Rollouts:
    """A step's rollouts with shaped rewards; with dynamic sampling, those of informative groups.

    Args:
        source: provides groups.
        step: the step of the rollouts.
        config: the algorithm's section.
        shape: shapes the rewards of a batch with one row per rollout, in place; returns metrics.
        is_informative: [B] bool, False for rows of groups with equal rewards. It must be True for the environment's
            rewards and for the shaped ones, which `reward_scaling` may clip to be equal.

    Raises:
        RLCoreError: no group is informative.
    """
    if not config.use_dynamic_sampling:
        return draw_once(source, step, config=config, shape=shape)

    def keep(group: list[Trajectory]) -> bool:
        batch = _masked(to_batch(group), config)
        informative = is_informative(batch)
        _shape(batch, shape)
        return bool((informative & is_informative(batch) & (batch["sample_mask"] > 0)).any())

    selection = Selection(
        keep=keep,
        max_groups=config.dynamic_sampling_max_gen_batches * config.prompts_per_draw,
        oversampling=config.batch_multiplier,
        advice="All rewards were equal within their group, so there is nothing to learn. The task is solved, too hard, or its "
        "reward is constant. Check the rollouts of the previous step; use easier or harder prompts, a higher temperature or "
        "more samples per prompt.",
    )
    return _prepared(source.take(step, config.num_prompts_per_step, selection), config=config, shape=shape)


def draw_once(
    source: RolloutSource, step: int, *, config: PolicyGradientConfig, shape: Callable[[Batch], dict[str, float]]
) -> Rollouts:
    """A step's rollouts, all groups included, with shaped rewards; arguments as `draw_rollouts`."""
    return _prepared(source.take(step, config.num_prompts_per_step), config=config, shape=shape)


def _prepared(draw: Rollouts, *, config: PolicyGradientConfig, shape: Callable[[Batch], dict[str, float]]) -> Rollouts:
    batch = _masked(draw.batch, config)
    return Rollouts(batch=batch, metrics=draw.metrics | _shape(batch, shape), trajectories=draw.trajectories)


def _masked(batch: Batch, config: PolicyGradientConfig) -> Batch:
    """The batch, with a `sample_mask` of 0 for rows that must not be trained on."""
    if config.overlong_filtering:
        batch["sample_mask"] = batch["sample_mask"] * ~batch["truncated"]
    return batch


def _shape(batch: Batch, shape: Callable[[Batch], dict[str, float]]) -> dict[str, float]:
    rollouts = join_segments(batch)
    metrics = shape(rollouts)
    for key in ("rewards", "reward_parts"):
        batch[key] = spread(rollouts[key], batch)
    return metrics
