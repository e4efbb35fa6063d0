"""GRPO: samples a group of answers per prompt, compares their rewards, and takes clipped policy-gradient steps.

Follows https://arxiv.org/abs/2402.03300 (outcome supervision) with these departures:
  1. the loss is a mean over all trained tokens of a global batch, not a mean of per-sequence means
     (the paper's is `loss_fn.token_level_loss: false`);
  2. no KL penalty unless `loss_fn.reference_policy_kl_penalty` is set; the paper uses 0.04;
  3. rewards of a group are not divided by their standard deviation if they are equal up to rounding;
  4. the scoring pass is skipped if a step makes one optimizer step (the ratio is 1) or the ratio is to the sampler.

DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++ and GDPO use this module with another loss, estimator or
reward, see docs/algorithms/grpo.md.

Notation: P prompts, G samples per prompt, B rows, T tokens; B = P·G, or more if rollouts have several segments.

Dynamic sampling: a step trains on informative groups only, https://arxiv.org/abs/2503.14476, section 3.2.

A group is informative if the environment's rewards differ within it (equation 11, for rewards of 0 and 1). Shaped rewards do
not count: a group without a correct answer would look informative because its answers differ in length. Groups are selected or
dropped as a whole, when they end.

Log-probabilities of a step's rows under the policy and the reference policy, before the policy is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.testing.outputs.models import scored
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.policy_configs import GRPOConfig, PolicyGradientConfig
from rl_train.algorithms.rewards import RewardShaping, clip_advantages, kl_in_reward
from rl_train.algorithms.validation import validate
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.source import Rollouts, RolloutSource, Selection
from rl_train.rollouts.trajectory import Trajectory, join_segments, optimizer_batches, rollout_means, spread, to_batch
from rl_train.run import Run
from rl_train.weight_versions import stale_mask


def train(config: GRPOConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    assert run.weights is not None
    assert run.rollouts is not None
    policy, loss_fn = run.policy, run.loss_fn
    shape, estimate = RewardShaping(config, run.config), make_estimator(config.adv_estimator)
    rows_per_update = run.config.policy.train_global_batch_size
    one_update = rows_per_update is None or rows_per_update >= config.rows_per_step
    loss_fn.on_policy = config.skip_logprobs_when_on_policy and one_update
    score = ScoreRollouts(run)

    validate(run, step=0)
    for step in run.steps():
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = draw_rollouts(run.rollouts, step, config=config, shape=shape, is_informative=estimate.is_informative)
            batch = rollouts.batch

        with run.timed("score"):
            run.free_memory_for(policy)
            run.metrics.add(score(batch))
            advantages = estimate(batch)
            batch["advantages"], clipped = clip_advantages(advantages.values, batch["token_mask"], config)

        with run.timed("train"):
            policy.prepare_for_training()
            rows, gbs = optimizer_batches(batch, rows_per_update, multiple_of=run.data_ranks)
            run.record_training(policy.train(rows, loss_fn, gbs=gbs), batch)
            policy.finish_training()

        run.metrics.add(rollouts.metrics | advantages.metrics | clipped)
        advantage = rollout_means(batch["advantages"], batch)
        run.log_rollouts(rollout_records(rollouts.trajectories, advantage, batch.get("prev_logprobs")), step)
        validate(run, step)


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


class ScoreRollouts:
    """Adds the log-probabilities that the loss and a KL penalty in the reward need to the rows of a step.

    Only computes what is used: not `prev_logprobs` if the loss is on-policy or compares with the sampler, and not
    `reference_policy_logprobs` if nothing is compared with the reference policy.

    Args:
        run: its policy scores the rows; an adaptive penalty weight is saved in its checkpoints.
    """

    def __init__(self, run: Run) -> None:
        self._policy, self._loss_fn = run.policy, run.loss_fn
        self._penalize = kl_in_reward(run.config.loss_fn)
        if self._penalize is not None and self._penalize.controller is not None:
            run.keep("adaptive_kl", self._penalize.controller)

    def __call__(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Add the needed keys to the batch; returns metrics of the penalty, if there is one."""
        if isinstance(self._loss_fn, ClippedPGLossFn):
            stale = stale_mask(batch, self._policy.weight_version)
            self._loss_fn.has_stale_tokens = stale is not None
            if stale is not None:
                batch["stale_mask"] = stale
        needed = self._loss_fn.required_keys | (self._penalize.required_keys if self._penalize else frozenset())
        if "prev_logprobs" in needed:
            batch["prev_logprobs"] = scored(self._policy.get_logprobs, batch)["logprobs"]
        if "reference_policy_logprobs" in needed:
            scores = scored(self._policy.get_reference_policy_logprobs, batch)
            batch["reference_policy_logprobs"] = scores["reference_logprobs"]
        return self._penalize(batch) if self._penalize is not None else {}
