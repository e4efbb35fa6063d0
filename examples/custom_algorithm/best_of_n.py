"""Best of N: sample N answers to each prompt, keep the best, and raise its likelihood. An algorithm of your own, by its path.

Rejection-sampling fine-tuning, https://arxiv.org/abs/2304.06767: no baseline, no ratio, no reference policy. What it cannot
do is to make a bad answer less likely; that is what grpo is for.
"""

from rl_core.algorithms.validation import validate


def best_rows(batch, min_reward):
    """The row of the best sample of each group, of groups whose best earns more than `min_reward`."""
    rows = []
    for group in batch["group_ids"].unique():
        members = (batch["group_ids"] == group).nonzero().flatten()
        best = members[batch["rewards"][members].argmax()]
        if batch["rewards"][best] > min_reward and batch["sample_mask"][best] > 0:
            rows.append(int(best))
    return rows


def train(config, run):
    """Train `run.policy` for `config.max_num_steps` steps in all, from `run.first_step` on."""
    validate(run, step=0)
    for step in run.steps():  # between two steps: metrics are flushed, a checkpoint is made where one is due
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = run.rollouts.next_batch(step)
            rows = best_rows(rollouts.batch, config.min_reward)

        if rows:
            with run.timed("train"):
                batch = rollouts.batch.select_indices(rows)
                run.policy.prepare_for_training()
                run.record_training(run.policy.train(batch, run.loss_fn), batch)
                run.policy.finish_training()

        run.metrics.add(rollouts.metrics | {"best_of_n/kept_frac": len(rows) / config.num_prompts_per_step})
        validate(run, step)
