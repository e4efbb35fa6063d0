"""The verbs of a step, of which the loop of an algorithm consists.

    for step in run.steps():
        refit(run)                            # give the engine the policy's weights
        batch = rollouts(run, step, groups)   # sample; one row per rollout
        score(run, batch)                     # log-probabilities before the step, as far as the loss reads them
        batch["advantages"] = ...
        optimize(run, batch)                  # take the optimizer steps
        log(run, batch, step)                 # write the rollouts
        validate(run, step)                   # if it is due

Verbs that compute time themselves (`time/<phase>_s`), record their metrics, and take the device memory that they need. A
rollout whose history was rewritten has several segments: a row for an algorithm, several rows for models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.testing.outputs.models import scored
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.schedule import stale_mask
from rl_train.rollouts.source import Selection
from rl_train.rollouts.teacher_rows import teacher_scores
from rl_train.rollouts.trajectory import join_segments, optimizer_batches, rollout_means, split_segments
from rl_train.run import Run
from rl_train.validate import validate as validate

Batch = BatchedDataDict[Any]
_Part = TypeVar("_Part")


def declared(part: _Part | None, name: str) -> _Part:
    """A part of the run that the algorithm's section declares in `runtime_needs`; RLCoreError if it does not."""
    if part is None:
        raise RLCoreError(f"The algorithm uses {name}, which the `runtime_needs` of its section do not declare.")
    return part


def refit(run: Run) -> None:
    """Give the engine the weights of the policy, if it has others."""
    with run.timed("refit"):
        weights: Any = declared(run.weights, "rollouts")
        run.metrics.add(weights.sync(only_if_stale=True))


def rollouts(run: Run, step: int, groups: int, selection: Selection | None = None) -> Batch:
    """The next groups of rollouts, one row each; arguments as `RolloutSource.take`."""
    with run.timed("rollout"):
        drawn = declared(run.rollouts, "rollouts").take(step, groups, selection)
        run.metrics.add(drawn.metrics)
        run.trajectories = drawn.trajectories
        return join_segments(drawn.batch)


def next_rows(run: Run) -> Batch:
    """The next rows of the data, for an algorithm that does not sample."""
    with run.timed("data"):
        return declared(run.batches, "records").next_batch()


def score(run: Run, batch: Batch, also: Collection[str] = ()) -> None:
    """Add the log-probabilities of the batch's tokens that the loss compares with, before the step.

    Only what is read: not `prev_logprobs` if the step trains the weights that it scores (`LossFunction.on_policy`), and not
    `reference_policy_logprobs` without a penalty. `also` are further columns that the algorithm reads. `stale_mask` marks the
    tokens that older weights sampled. Rows that are too long for a teacher with its own prompt are masked.
    """
    with run.timed("score"):
        kept = batch["sample_mask"].count_nonzero()
        add_logprobs(run, batch, also)
        if run.teacher_prompts is not None:
            run.metrics.add({"distillation/too_long_rows": kept - batch["sample_mask"].count_nonzero()})


def add_logprobs(run: Run, batch: Batch, also: Collection[str] = ()) -> None:
    """What `score` adds, untimed; also for the rows of a validation."""
    run.loss_fn.on_policy = run.config.algorithm.is_on_policy(run.config)
    needed = run.loss_fn.required_keys | frozenset(also)
    rows = split_segments(batch)
    found: dict[str, torch.Tensor] = {}
    if run.teacher is not None or run.teachers:

        def scores_of(teacher: ColocatablePolicyInterface, own: Batch) -> dict[str, torch.Tensor]:
            run.free_memory_for(teacher)
            scores: dict[str, torch.Tensor] = {}
            with _weights_of_teacher(run, teacher):
                if run.loss_fn.candidates_key is not None:
                    scores.update(scored(teacher.get_topk_logprobs, own, run.config.loss_fn.num_candidates))
                if "teacher_logprobs" in needed:
                    scores.update(scored(teacher.get_logprobs, own))
            return scores

        teachers = run.teachers if run.teacher is None else run.teacher
        found |= teacher_scores(rows, teachers, run.teacher_prompts, scores_of=scores_of)
    run.free_memory_for(run.policy)
    if "prev_logprobs" in needed:
        found["prev_logprobs"] = scored(run.policy.get_logprobs, rows)["logprobs"]
    if "reference_policy_logprobs" in needed:
        scores = scored(run.policy.get_reference_policy_logprobs, rows)
        found["reference_policy_logprobs"] = scores["reference_logprobs"]
    stale = stale_mask(rows, run.policy.weight_version)
    if stale is not None:
        found["stale_mask"] = stale
    # As the batch, with one row per rollout.
    joined = found if rows is batch else join_segments(BatchedDataDict[Any]({**rows, **found}))
    for key in found:
        batch[key] = joined[key]


@contextmanager
def _weights_of_teacher(run: Run, teacher: Any) -> Iterator[None]:
    """If the teacher is the moving average of the policy's weights, the policy has these while the block runs."""
    if run.config.algorithm.runtime_needs.teacher_decay is None:
        yield
        return
    teacher.average_weights()
    try:
        yield
    finally:
        teacher.average_weights()


def optimize(run: Run, batch: Batch, train: Callable[[Batch], Mapping[str, Any]] | None = None) -> None:
    """Take optimizer steps on the batch: each on `policy.train_global_batch_size` whole rollouts, in one pass.

    `train` takes them instead, and returns the result of `PolicyInterface.train`.
    """
    with run.timed("train"):
        run.free_memory_for(run.policy)
        rows = split_segments(batch)
        rows = BatchedDataDict[Any]({**rows, **run.loss_fn.batch_columns(rows)})
        run.policy.prepare_for_training()
        if train is not None:
            result = train(rows)
        else:
            per_update = run.config.policy.train_global_batch_size
            filled, gbs = optimizer_batches(rows, per_update, multiple_of=run.data_ranks)
            result = run.policy.train(filled, run.loss_fn, gbs=gbs)
        run.record_training(result, rows)
        run.policy.finish_training()
        if (decay := run.config.algorithm.runtime_needs.teacher_decay) is not None:
            policy: Any = run.policy
            policy.average_weights(decay)


def log(run: Run, batch: Batch, step: int) -> None:
    """Write the rollouts of the step, with the mean advantage of each if the batch has `advantages`."""
    rows = split_segments(batch)
    advantages = rollout_means(rows["advantages"], rows) if "advantages" in rows else None
    run.log_rollouts(rollout_records(run.trajectories, advantages, rows.get("prev_logprobs")), step)
