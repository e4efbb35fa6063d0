"""Dynamic sampling: draws prompts until a step has enough informative groups, https://arxiv.org/abs/2503.14476, section 3.2.

A group is informative if the environment's rewards differ within it (equation 11, for rewards of 0 and 1). Shaped rewards do
not count: a group without a correct answer would look informative because its answers differ in length. Groups are selected or
dropped as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_train.algorithms.grpo_config import GRPOConfig
from rl_train.algorithms.policy_gradient_config import PolicyGradientConfig
from rl_train.rollouts.segments import join_segments, spread
from rl_train.rollouts.source import Rollouts, RolloutSource

Batch = BatchedDataDict[Any]
_SUMMED = (
    "rollout/rows",
    "rollout/failed_rows",
    "rollout/repeated_steps",
    "rollout/restarted",
    "rollout/replaced_groups",
    "rollout/wait_s",
)
_LARGEST = ("length/max",)
_ABSENT_IF_ZERO = ("rollout/unscored_frac",)


def draw_rollouts(
    source: RolloutSource,
    step: int,
    *,
    config: GRPOConfig,
    shape: Callable[[Batch], dict[str, float]],
    is_informative: Callable[[Batch], torch.Tensor],
) -> Rollouts:
    """A step's rollouts, filtered, with shaped rewards: one draw, or as many as dynamic sampling needs.

    Each draw takes the groups that are missing, times `batch_multiplier`; informative groups beyond P are dropped. If
    `dynamic_sampling_max_gen_batches` is reached first, the step has fewer groups; the metrics report how many are missing.

    Args:
        source: provides groups.
        step: the step of the rollouts.
        config: the algorithm's section.
        shape: shapes the rewards of a draw with one row per rollout, in place; returns metrics.
        is_informative: [B] bool, False for rows of groups with equal rewards. It must be True for the environment's
            rewards and for the shaped ones, which `reward_scaling` may clip to be equal.

    Raises:
        RLCoreError: no group of any draw is informative.
    """
    if not config.use_dynamic_sampling:
        return draw_once(source, step, config=config, shape=shape)
    num_prompts = config.num_prompts_per_step
    selected: list[Rollouts] = []
    metrics: list[dict[str, float]] = []
    num_groups = drawn = 0
    while num_groups < num_prompts and len(metrics) < config.dynamic_sampling_max_gen_batches:
        raw = _draw(source, step, math.ceil((num_prompts - num_groups) * config.batch_multiplier), config=config)
        informative = is_informative(raw.batch)
        draw = _shaped(raw, shape)
        metrics.append(draw.metrics)
        drawn += len(draw.batch["group_ids"].unique())
        groups = _trained_groups(draw.batch, informative & is_informative(draw.batch))
        if groups:
            selected.append(_select(draw, groups[: num_prompts - num_groups], first_id=num_groups))
        num_groups += len(groups)
    if not selected:
        raise RLCoreError(
            f"Step {step} drew {drawn} prompts in {len(metrics)} draws, but all rewards were equal within their group, so "
            "there is nothing to learn. The task is solved, too hard, or its reward is constant. Check the rollouts of the "
            "previous step; use easier or harder prompts, a higher temperature or more samples per prompt."
        )
    counts = {
        "dynamic_sampling/draws": float(len(metrics)),
        "dynamic_sampling/dropped_groups": float(drawn - num_groups),
        "dynamic_sampling/surplus_groups": float(max(num_groups - num_prompts, 0)),
        "dynamic_sampling/missing_groups": float(max(num_prompts - num_groups, 0)),
    }
    return _concat(selected, metrics=_over_draws(metrics) | counts)


def draw_once(
    source: RolloutSource, step: int, *, config: PolicyGradientConfig, shape: Callable[[Batch], dict[str, float]]
) -> Rollouts:
    """One draw, without the rows that must not be trained on, and with its rewards shaped; arguments as `draw_rollouts`."""
    return _shaped(_draw(source, step, config.num_prompts_per_step, config=config), shape)


def _draw(source: RolloutSource, step: int, groups: int, *, config: PolicyGradientConfig) -> Rollouts:
    """One draw with the environment's rewards; rows that must not be trained on have a `sample_mask` of 0."""
    draw = source.take(step, groups)
    if config.overlong_filtering:
        draw.batch["sample_mask"] = draw.batch["sample_mask"] * ~draw.batch["truncated"]
    return draw


def _shaped(draw: Rollouts, shape: Callable[[Batch], dict[str, float]]) -> Rollouts:
    rollouts = join_segments(draw.batch)
    metrics = draw.metrics | shape(rollouts)
    for key in ("rewards", "reward_parts"):
        draw.batch[key] = spread(rollouts[key], draw.batch)
    return Rollouts(batch=draw.batch, metrics=metrics, trajectories=draw.trajectories)


def _trained_groups(batch: Batch, informative: torch.Tensor) -> list[int]:
    """Ids of informative groups that have a row to train on, in the order of the batch."""
    trained = informative & (batch["sample_mask"] > 0)
    return list(dict.fromkeys(batch["group_ids"][trained].tolist()))


def _select(draw: Rollouts, groups: Sequence[int], *, first_id: int) -> Rollouts:
    """The rollouts of these groups with new group ids, because other draws have the same ids."""
    new_id = {group: first_id + position for position, group in enumerate(groups)}
    rows = [row for row, group in enumerate(draw.batch["group_ids"].tolist()) if group in new_id]
    batch = draw.batch.select_indices(rows)
    batch["group_ids"] = torch.tensor([new_id[group] for group in batch["group_ids"].tolist()], dtype=torch.int64)
    rollouts, batch["rollout_ids"] = batch["rollout_ids"].unique_consecutive(return_inverse=True)
    trajectories = [draw.trajectories[rollout] for rollout in rollouts.tolist()]
    for row, rollout in enumerate(batch["rollout_ids"].tolist()):
        trajectories[rollout].group_id = int(batch["group_ids"][row])
    return Rollouts(batch=batch, metrics={}, trajectories=trajectories)


def _concat(selected: Sequence[Rollouts], *, metrics: dict[str, float]) -> Rollouts:
    trajectories = [trajectory for draw in selected for trajectory in draw.trajectories]
    firsts = itertools.accumulate((len(draw.trajectories) for draw in selected), initial=0)
    for draw, first in zip(selected, firsts, strict=False):
        draw.batch["rollout_ids"] = draw.batch["rollout_ids"] + first
    batch: Batch = BatchedDataDict.from_batches([draw.batch for draw in selected])
    return Rollouts(batch=batch, metrics=metrics, trajectories=trajectories)


def _over_draws(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics over all draws, including dropped groups."""
    joined = {}
    for name in dict.fromkeys(name for draw_metrics in metrics for name in draw_metrics):
        values = [draw_metrics[name] for draw_metrics in metrics if name in draw_metrics]
        if name in _LARGEST:
            joined[name] = max(values)
        else:
            draws = len(metrics) if name in _ABSENT_IF_ZERO else len(values)
            joined[name] = sum(values) / (1 if name in _SUMMED else draws)
    return joined
