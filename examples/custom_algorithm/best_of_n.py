"""Best of N: sample N answers to each prompt, keep the best, and train on it: a custom algorithm, named by its import path.

Rejection-sampling fine-tuning, https://arxiv.org/abs/2304.06767: no baseline, no ratio, no reference policy. It cannot make
a bad answer less likely; use grpo for that.
"""

from rl_train.step import log, optimize, refit, rollouts, validate


def best_rows(batch, min_reward):
    """Row indices of the best sample of each group, for groups whose best reward is above `min_reward`."""
    rows = []
    for group in batch["group_ids"].unique():
        members = (batch["group_ids"] == group).nonzero().flatten()
        best = members[batch["rewards"][members].argmax()]
        if batch["rewards"][best] > min_reward and batch["sample_mask"][best] > 0:
            rows.append(int(best))
    return rows


def train(config, run):
    """Train `run.policy` up to step `config.max_num_steps`, starting at `run.first_step`."""
    validate(run, step=0)
    for step in run.steps():  # between steps: metrics are flushed, due checkpoints are saved
        refit(run)
        batch = rollouts(run, step, config.num_prompts_per_step)
        rows = best_rows(batch, config.min_reward)
        if rows:
            optimize(run, batch.select_indices(rows))
        log(run, batch, step)  # rollouts/ in the run folder, --show-samples
        run.metrics.add({"best_of_n/kept_frac": len(rows) / config.num_prompts_per_step})
        validate(run, step)
