"""PPO: sample answers, let a critic say what each token was worth, take clipped policy-gradient steps; teach the critic.

Follows https://arxiv.org/abs/1707.06347 with the advantages of https://arxiv.org/abs/1506.02438, in the form that language
models are trained in (https://arxiv.org/abs/1909.08593): a token is an action, the reward comes with the last one, and each
token may cost its KL to the reference policy. Departures:
  1. policy and critic are two models with optimizers of their own, not one with a weighted sum of losses;
  2. no KL penalty unless `loss_fn` asks for it, in the reward or in the loss, with a constant weight unless
     `loss_fn.adaptive_kl` moves it; no bonus for entropy;
  3. tokens between turns are no actions and cost no discount: a token leads to the next *sampled* one;
  4. the limit of length is part of the task: nothing comes after a cut (`gae.bootstrap_truncated` says otherwise);
  5. advantages are normalised over all of a step's tokens, not within each minibatch;
  6. where a step makes one optimizer step, the importance ratio is 1, so the scoring pass before it is skipped.

Letters: P prompts, G samples per prompt, B = P·G rows, T tokens.
"""

from __future__ import annotations

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
    """Train `run.policy` and `run.value` for `config.max_num_steps` steps in all, from `run.first_step` on."""
    assert run.weights is not None
    assert run.rollouts is not None
    assert run.value is not None
    config.refuse_a_warmup_of(config.max_num_steps)
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
            run.metrics.add(score(batch))
            batch["prev_values"] = critic.get_values(batch)["values"]
            credit = compute_gae_targets(batch, config.gae)
            batch["returns"] = credit.returns
            batch["advantages"], clipped = clip_advantages(credit.advantages, batch["token_mask"], config)

        passes, seed = config.ppo_epochs, (config.seed, step)
        with run.timed("train_value"):
            learnt = train_epochs(critic, critic_rows(batch), value_loss_fn, passes=passes, seed=seed)
            run.metrics.add(critic_metrics(learnt))

        staleness = policy.weight_version - batch["weight_version"]
        if step > config.critic_warmup_steps:
            with run.timed("train"):
                run.record_training(train_epochs(policy, batch, loss_fn, passes=passes, seed=seed), batch)

        run.metrics.add(rollouts.metrics | credit.metrics | clipped)
        run.metrics.add({"staleness/mean": staleness.float().mean()})
        advantage = row_means(batch["advantages"], batch["token_mask"])
        run.log_rollouts(rollout_records(rollouts.trajectories, advantage, batch.get("prev_logprobs")), step)
        validate(run, step)
