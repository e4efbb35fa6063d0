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
"""

from __future__ import annotations

from rl_train.algorithms.dynamic_sampling import draw_rollouts
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.grpo_config import GRPOConfig
from rl_train.algorithms.logprobs import ScoreRollouts
from rl_train.algorithms.rewards import RewardShaping, clip_advantages
from rl_train.algorithms.validation import validate
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.segments import optimizer_batches, rollout_means
from rl_train.run import Run


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
