"""GRPO: sample a group of answers to each prompt, centre rewards on the group, take clipped policy-gradient steps.

Follows https://arxiv.org/abs/2402.03300 (outcome supervision) with these departures:
  1. the loss is a mean over all trained tokens of a global batch, not a mean of per-sequence means
     (`loss_fn.token_level_loss: false` is the paper's);
  2. no KL penalty unless `loss_fn.reference_policy_kl_penalty` is set; the paper has 0.04;
  3. rewards of a group are divided by one standard deviation per group, and not at all where they are equal up to rounding;
  4. where a step makes one optimizer step, the importance ratio is 1, so the scoring pass before it is skipped.

Letters: P prompts, G samples per prompt, B = P·G rows, T tokens.
"""

from __future__ import annotations

from rl_core.algorithms.advantages import group_advantages
from rl_core.algorithms.grpo_config import GRPOConfig
from rl_core.algorithms.validation import validate
from rl_core.rollouts.records import rollout_records
from rl_core.run import Run


def train(config: GRPOConfig, run: Run) -> None:
    """Train `run.policy` for `config.max_num_steps` steps in all, from `run.first_step` on."""
    assert run.weights is not None
    assert run.rollouts is not None
    policy, loss_fn = run.policy, run.loss_fn
    rows_per_update = run.config.policy.train_global_batch_size
    one_update = rows_per_update is None or rows_per_update >= config.num_prompts_per_step * config.num_generations_per_prompt
    loss_fn.on_policy = config.skip_logprobs_when_on_policy and one_update

    validate(run, step=0)
    for step in run.steps():
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = run.rollouts.next_batch(step)
            batch = rollouts.batch

        with run.timed("score"):
            advantages = group_advantages(
                batch["rewards"],
                batch["group_ids"],
                normalize=config.adv_estimator.normalize_rewards,
                leave_one_out=config.adv_estimator.use_leave_one_out_baseline,
            )
            batch["advantages"] = advantages.values.unsqueeze(-1) * batch["token_mask"]
            if config.overlong_filtering:
                batch["sample_mask"] = batch["sample_mask"] * ~batch["truncated"]
            if "prev_logprobs" in loss_fn.required_keys:
                batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
            if "reference_policy_logprobs" in loss_fn.required_keys:
                scores = policy.get_reference_policy_logprobs(batch)
                batch["reference_policy_logprobs"] = scores["reference_logprobs"]

        with run.timed("train"):
            policy.prepare_for_training()
            staleness = policy.weight_version - batch["weight_version"]
            run.record_training(policy.train(batch, loss_fn), batch)
            policy.finish_training()

        run.metrics.add(rollouts.metrics)
        run.metrics.add(
            {
                "advantage/equal_group_frac": advantages.equal_group_frac,
                "reward/group_std": advantages.mean_group_std,
                "staleness/mean": staleness.float().mean(),
            }
        )
        run.log_rollouts(rollout_records(rollouts.trajectories, advantages.values), step)
        validate(run, step)
