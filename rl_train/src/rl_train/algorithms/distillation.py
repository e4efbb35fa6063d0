"""On-policy distillation: the student is trained towards the teacher's distribution at each token of the student's answers.

Follows GKD, https://arxiv.org/abs/2306.13649, algorithm 1, with its lambda as `student_data_fraction` (1 by default: all
answers are the student's), with these departures:
  1. the divergence is computed on the teacher's K most likely tokens and one bucket for all others, not on the whole
     vocabulary; the paper's is K = V (`loss_fn.topk`);
  2. the loss is a mean over all trained tokens of a global batch, not a mean of per-sequence means
     (the paper's is `loss_fn.token_level_loss: false`);
  3. student and teacher are compared at the sampling temperature of the student;
  4. with `loss_fn.topk: null` the reverse KL is estimated from the sampled tokens, as a policy gradient in which each token
     only gets its own KL; in MiniLLM (https://arxiv.org/abs/2306.08543) it also gets that of later tokens.

As in the papers, there is no gradient through sampling. Rewards are not needed; without `env`, a rollout has one turn.

Notation: P prompts, G samples per prompt, B = P·G rows, T tokens, K candidates, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.testing.outputs.models import scored
from rl_train.algorithms.supervised_configs import DistillationConfig
from rl_train.algorithms.validation import validate
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.trajectory import optimizer_batches
from rl_train.run import Run


def train(config: DistillationConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    assert run.weights is not None
    assert run.rollouts is not None
    assert run.teacher is not None
    policy, teacher, loss_fn = run.policy, run.teacher, run.loss_fn
    rows_per_update = run.config.policy.train_global_batch_size
    loss_fn.on_policy = rows_per_update is None or rows_per_update >= config.rows_per_step

    def score(batch: BatchedDataDict[Any]) -> None:
        run.free_memory_for(teacher)
        if loss_fn.candidates_key is not None:
            topk = scored(teacher.get_topk_logprobs, batch, run.config.loss_fn.num_candidates)
            batch["teacher_topk_token_ids"] = topk["topk_token_ids"]
            batch["teacher_topk_logprobs"] = topk["topk_logprobs"]
        if "teacher_logprobs" in loss_fn.required_keys:
            batch["teacher_logprobs"] = scored(teacher.get_logprobs, batch)["logprobs"]
        run.free_memory_for(policy)
        if "prev_logprobs" in loss_fn.required_keys:
            batch["prev_logprobs"] = scored(policy.get_logprobs, batch)["logprobs"]

    validate(run, step=0, score=score)
    for step in run.steps():
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = run.rollouts.take(step, config.num_prompts_per_step)
            batch = rollouts.batch

        with run.timed("score"):
            score(batch)

        with run.timed("train"):
            policy.prepare_for_training()
            rows, gbs = optimizer_batches(batch, rows_per_update, multiple_of=run.data_ranks)
            run.record_training(policy.train(rows, loss_fn, gbs=gbs), batch)
            policy.finish_training()

        run.metrics.add(rollouts.metrics)
        run.log_rollouts(rollout_records(rollouts.trajectories, policy_logprobs=batch.get("prev_logprobs")), step)
        validate(run, step, score=score)
