"""GRPO: samples a group of answers per prompt, compares their rewards, and takes clipped policy-gradient steps.

Follows https://arxiv.org/abs/2402.03300 (outcome supervision) with these departures:
  1. the loss is a mean over all trained tokens of a global batch, not a mean of per-sequence means
     (the paper's is `loss_fn.token_level_loss: false`);
  2. no KL penalty unless `loss_fn.reference_policy_kl_penalty` is set; the paper uses 0.04;
  3. the advantage is 0 if the rewards of a group are equal up to rounding; its tokens still count in the mean;
  4. by default, a step makes one optimizer step: the ratio is 1, nothing is clipped, and the scoring pass is skipped, as also
     with a ratio to the sampler. `policy.train_global_batch_size` sets more steps.

One step: give the engine the new weights; sample G answers to each of P prompts; with dynamic sampling, replace groups that
teach nothing; an answer's advantage is its reward less the mean of its group, divided by their standard deviation; every token
of the answer has this advantage; take clipped gradient steps (`losses/policy_gradient.py`); validate when due. A token trains
if the model sampled it (`token_mask`) and its answer was scored and not filtered (`sample_mask`).

DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++ and GDPO use this module with another loss, estimator or
reward, see docs/algorithms/grpo.md.

Notation: names end with the axes of their tensor: R = P·G rollouts, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_train.algorithms.policy_configs import GRPOConfig
from rl_train.algorithms.rewards import RewardShaping, clip_advantages, kl_penalty
from rl_train.rollouts.advantages import per_group
from rl_train.rollouts.source import Selection
from rl_train.rollouts.trajectory import Trajectory, join_segments, to_batch
from rl_train.run import Run
from rl_train.step import Batch, declared, log, optimize, refit, rollouts, score, validate


def train(config: GRPOConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    shape = RewardShaping(config, run.config)  # scales rewards; lowers those of long answers, or filters truncated ones
    penalize = kl_penalty(run)  # with `loss_fn.use_kl_in_reward`, each token's KL to the reference policy
    estimate = declared(run.estimator, "advantages")  # by default `group_relative` for all tokens of an answer
    informative = only_informative(config, shape, estimate.is_informative) if config.use_dynamic_sampling else None

    validate(run, step=0)
    for step in run.steps():
        refit(run)

        batch = rollouts(run, step, config.num_prompts_per_step, informative)
        run.metrics.add(shape(batch))

        score(run, batch, also=penalize.required_keys)
        run.metrics.add(penalize(batch))

        advantages = estimate(batch)
        batch["advantages"], clipped = clip_advantages(advantages.values, batch["token_mask"], config)
        run.metrics.add(advantages.metrics | clipped)

        optimize(run, batch)

        log(run, batch, step)
        validate(run, step)


def group_relative(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    scored_R: torch.Tensor | None = None,
    sizes_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R] float32: each reward less the mean of its group, divided by their standard deviation; 0.0 in groups of equal rewards.

    The standard deviation is unbiased and over all rewards of the group, also with `leave_one_out`, because the standard
    deviation of the other rewards can be zero.

    Args:
        rewards_R: rewards, in any order.
        groups_R: int64; answers to one prompt share an id. A group of one has advantage zero.
        normalize: divide by the standard deviation (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2).
        leave_one_out: subtract the mean of the others instead (RLOO, https://arxiv.org/abs/2402.14740).
        scored_R: bool; answers with False count in no statistic and have advantage zero. None if all were scored.
        sizes_R: see `per_group`.
    """
    groups = per_group(rewards_R, groups_R, scored_R=scored_R, sizes_R=sizes_R)  # each statistic at the rows of its group
    advantages_R = rewards_R.double() - groups.mean_R
    if leave_one_out:  # reward less the mean of the others = (reward less the mean of all) · n / (n - 1)
        advantages_R = advantages_R * (groups.size_R / (groups.size_R - 1).clamp(min=1))
    if normalize:
        advantages_R = advantages_R / groups.std_R
    teaches_R = ~groups.equal_R if scored_R is None else ~groups.equal_R & scored_R
    return torch.where(teaches_R, advantages_R, 0.0).float()


def only_informative(
    config: GRPOConfig, shape: Callable[[Batch], dict[str, float]], is_informative: Callable[[Batch], torch.Tensor]
) -> Selection:
    """Dynamic sampling: a step trains on informative groups only, https://arxiv.org/abs/2503.14476, section 3.2.

    A group is informative if the environment's rewards differ within it (equation 11, for rewards of 0 and 1), and the shaped
    rewards do too, which `reward_scaling` may clip to be equal. Shaped rewards alone do not count: a group without a correct
    answer would look informative because its answers differ in length. Groups are kept or dropped as a whole, when they end.
    """

    def keep(group: list[Trajectory]) -> bool:
        batch = join_segments(to_batch(group))
        informative_R = is_informative(batch)
        shape(batch)
        return bool((informative_R & is_informative(batch) & (batch["sample_mask"] > 0)).any())

    return Selection(
        keep=keep,
        max_groups=config.dynamic_sampling_max_gen_batches * config.prompts_per_draw,
        oversampling=config.batch_multiplier,
        advice="All rewards were equal within their group, so there is nothing to learn. The task is solved, too hard, or its "
        "reward is constant. Check the rollouts of the previous step; use easier or harder prompts, a higher temperature or "
        "more samples per prompt.",
    )
