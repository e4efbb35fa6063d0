"""PPO: samples answers, estimates advantages with a critic, and takes clipped policy-gradient steps; also trains the critic.

Follows https://arxiv.org/abs/1707.06347 with the advantages of https://arxiv.org/abs/1506.02438, in the form used
for language models (https://arxiv.org/abs/1909.08593): a token is an action, the reward is that of the last token, and each
token may have a KL penalty to the reference policy. Departures:
  1. policy and critic are two models with separate optimizers, not one model with a weighted sum of losses;
  2. no KL penalty unless `loss_fn` enables it, in the reward or in the loss, with a constant weight unless
     `loss_fn.adaptive_kl` adapts it; no entropy bonus;
  3. tokens between turns are not actions and are not discounted: a token leads to the next *sampled* one;
  4. the length limit is part of the task: a truncated answer has no further reward, unless `gae.bootstrap_truncated` is set;
  5. advantages are normalized over all tokens of a step, not within each minibatch;
  6. the scoring pass is skipped if a step makes one optimizer step (the ratio is 1) or the ratio is to the sampler.

Notation: P prompts, G samples per prompt, B = P·G rows, T tokens.
"""

from __future__ import annotations

from rl_core.testing.outputs.models import scored
from rl_train.algorithms.critic import compute_gae_targets, critic_metrics, critic_rows
from rl_train.algorithms.dynamic_sampling import draw_once
from rl_train.algorithms.epochs import train_epochs
from rl_train.algorithms.logprobs import ScoreRollouts
from rl_train.algorithms.losses.reduce import row_means
from rl_train.algorithms.losses.value import MseValueLossFn
from rl_train.algorithms.ppo_config import PPOConfig
from rl_train.algorithms.rewards import RewardShaping, clip_advantages
from rl_train.algorithms.validation import validate
from rl_train.rollouts.records import rollout_records
from rl_train.run import Run


def train(config: PPOConfig, run: Run) -> None:
    """Train `run.policy` and `run.value` up to step `config.max_num_steps`, starting after `run.first_step`."""
    assert run.weights is not None
    assert run.rollouts is not None
    assert run.value is not None
    config.check_warmup(config.max_num_steps)
    policy, critic, loss_fn, value_loss_fn = run.policy, run.value, run.loss_fn, MseValueLossFn(config.value_loss)
    shape, score = RewardShaping(config, run.config), ScoreRollouts(run)
    loss_fn.on_policy = config.skip_logprobs_when_on_policy and config.takes_one_step(run.config)

    validate(run, step=0)
    for step in run.steps():
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = draw_once(run.rollouts, step, config=config, shape=shape)
            batch = rollouts.batch

        with run.timed("score"):
            run.free_memory_for(policy)
            run.metrics.add(score(batch))
            run.free_memory_for(critic)
            batch["prev_values"] = scored(critic.get_values, batch)["values"]
            targets = compute_gae_targets(batch, config.gae)
            batch["returns"] = targets.returns
            batch["advantages"], clipped = clip_advantages(targets.advantages, batch["token_mask"], config)

        passes, seed = config.ppo_epochs, (config.seed, step)
        with run.timed("train_value"):
            result = train_epochs(critic, critic_rows(batch), value_loss_fn, passes=passes, seed=seed)
            run.metrics.add(critic_metrics(result))

        if step > config.critic_warmup_steps:
            with run.timed("train"):
                run.free_memory_for(policy)
                run.record_training(train_epochs(policy, batch, loss_fn, passes=passes, seed=seed), batch)

        run.metrics.add(rollouts.metrics | targets.metrics | clipped)
        advantage = row_means(batch["advantages"], batch["token_mask"])
        run.log_rollouts(rollout_records(rollouts.trajectories, advantage, batch.get("prev_logprobs")), step)
        validate(run, step)
