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

With `teacher_prompt`, the teacher scores the same tokens after another prompt, as in OPSD, https://arxiv.org/abs/2601.18734,
and SDPO, https://arxiv.org/abs/2601.20802: see `rl_train.rollouts.teacher_rows`.

As in the papers, there is no gradient through sampling. Rewards are not needed; without `env`, a rollout has one turn.

Notation: P prompts, G samples per prompt, B = P·G rows, T tokens, K candidates, V vocabulary.
"""

from __future__ import annotations

from rl_train.algorithms.supervised_configs import DistillationConfig
from rl_train.run import Run
from rl_train.step import add_logprobs, log, optimize, refit, rollouts, score, validate


def train(config: DistillationConfig, run: Run) -> None:
    """Train `run.policy` up to step `config.max_num_steps`, starting after `run.first_step`."""
    validate(run, step=0, score=add_logprobs)
    for step in run.steps():
        refit(run)
        batch = rollouts(run, step, config.num_prompts_per_step)
        score(run, batch)
        optimize(run, batch)
        log(run, batch, step)
        validate(run, step, score=add_logprobs)
