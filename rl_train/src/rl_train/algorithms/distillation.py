"""On-policy distillation: the student answers, and learns at every token of its answer what the teacher would have said.

Follows GKD, https://arxiv.org/abs/2306.13649, algorithm 1, whose lambda is `student_data_fraction` (1 by default: all answers
are the student's own), with these departures:
  1. the divergence is taken on the teacher's K likeliest tokens and a bucket for all others, not on the whole vocabulary;
     K = V (`loss_fn.topk`) is the paper's;
  2. the loss is a mean over all trained tokens of a global batch, not a mean of per-sequence means
     (`loss_fn.token_level_loss: false` is the paper's);
  3. student and teacher are compared at the temperature that the student samples with;
  4. with `loss_fn.topk: null` the reverse KL is told by the sampled tokens alone, as a policy gradient in which each token
     answers for itself; MiniLLM (https://arxiv.org/abs/2306.08543) also lets it answer for what comes after.

As in the papers no gradient goes through the sampling. Rewards are not needed: without a section `env` an answer is one turn.

Letters: P prompts, G samples per prompt, B = P·G rows, T tokens, K candidates, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.distillation_config import DistillationConfig
from rl_train.algorithms.validation import validate
from rl_train.rollouts.records import rollout_records
from rl_train.run import Run


def train(config: DistillationConfig, run: Run) -> None:
    """Train `run.policy` for `config.max_num_steps` steps in all, from `run.first_step` on."""
    assert run.weights is not None
    assert run.rollouts is not None
    assert run.teacher is not None
    policy, teacher, loss_fn = run.policy, run.teacher, run.loss_fn
    rows_per_update = run.config.policy.train_global_batch_size
    loss_fn.on_policy = rows_per_update is None or rows_per_update >= config.rows_per_step

    def score(batch: BatchedDataDict[Any]) -> None:
        if loss_fn.candidates_key is not None:
            topk = teacher.get_topk_logprobs(batch, run.config.loss_fn.num_candidates)
            batch["teacher_topk_token_ids"] = topk["topk_token_ids"]
            batch["teacher_topk_logprobs"] = topk["topk_logprobs"]
        if "teacher_logprobs" in loss_fn.required_keys:
            batch["teacher_logprobs"] = teacher.get_logprobs(batch)["logprobs"]
        teacher.offload_after_refit()
        if "prev_logprobs" in loss_fn.required_keys:
            batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]

    # The teacher rests in CPU memory, as a reference policy does, and visits the device while it scores.
    teacher.offload_after_refit()
    validate(run, step=0, score=score)
    for step in run.steps():
        with run.timed("refit"):
            run.metrics.add(run.weights.sync(only_if_stale=True))

        with run.timed("rollout"):
            rollouts = run.rollouts.next_batch(step)
            batch = rollouts.batch

        with run.timed("score"):
            score(batch)

        with run.timed("train"):
            policy.prepare_for_training()
            if "weight_version" in batch:
                run.metrics.add({"staleness/mean": (policy.weight_version - batch["weight_version"]).float().mean()})
            run.record_training(policy.train(batch, loss_fn), batch)
            policy.finish_training()

        run.metrics.add(rollouts.metrics)
        run.log_rollouts(rollout_records(rollouts.trajectories, policy_logprobs=batch.get("prev_logprobs")), step)
        validate(run, step, score=score)
