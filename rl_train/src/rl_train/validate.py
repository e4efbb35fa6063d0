"""Validation between steps, for all algorithms: rollouts of validation prompts and the loss on validation rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossType
from rl_train.rollouts.evaluation import ValidationSet
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.trajectory import Trajectory, to_batch
from rl_train.run import Run

_log = logging.getLogger("rlcore")
REPORTED = {"preference/": "global_valid_seqs", "kto/": "global_valid_seqs", "distillation/": "global_valid_toks"}
"""Metrics of a loss that are also reported as `validation/<quantity>`, and the count that they are averaged over."""


def validate(run: Run, step: int, *, score: Callable[[Run, BatchedDataDict[Any]], None] | None = None) -> None:
    """Validate after `step` steps if it is due (0: before the first step, logged as step 0).

    Args:
        run: the run.
        step: steps done.
        score: adds the keys that the loss needs to a validation batch, in place; with it, the loss is also computed on
            the answers to validation prompts.
    """
    due = run.validation_due(step)
    if not due:
        return
    rollouts: list[Trajectory] = []
    with run.timed("validate"):
        for dataset in due:
            metrics, trajectories = _validated(run, dataset, score)
            run.metrics.add(dataset.named(metrics))
            rollouts += trajectories
    if step == 0:
        if rollouts:
            run.log_rollouts(rollout_records(rollouts), 0)
        run.flush(0)


def _validated(
    run: Run, data: ValidationSet, score: Callable[[Run, BatchedDataDict[Any]], None] | None
) -> tuple[dict[str, float], list[Trajectory]]:
    """The metrics of one validation set, named `validation/...`, and its rollouts."""
    metrics: dict[str, float] = {}
    trajectories: list[Trajectory] = []
    if data.batches is not None:
        metrics |= _validation_loss(run, data.batches.epoch(), score)
    if data.evaluation is not None:
        assert run.weights is not None
        run.weights.sync(only_if_stale=True)
        found, trajectories = data.evaluation.evaluate()
        metrics |= found
        if score is not None:
            metrics |= _validation_loss(run, _batches(trajectories, run.config.algorithm.val_batch_size), score)
    return metrics, trajectories


def _batches(trajectories: Sequence[Trajectory], rows: int) -> Iterator[BatchedDataDict[Any]]:
    return (to_batch(trajectories[start : start + rows]) for start in range(0, len(trajectories), rows))


def _validation_loss(
    run: Run, batches: Iterable[BatchedDataDict[Any]], score: Callable[[Run, BatchedDataDict[Any]], None] | None
) -> dict[str, float]:
    """The loss on validation rows: a mean over all tokens (or sequences), independent of the batches."""
    of_loss = "global_valid_toks" if run.loss_fn.loss_type is LossType.TOKEN_LEVEL else "global_valid_seqs"
    sums: dict[str, float] = {}
    units: dict[str, float] = {}
    tokens = 0.0
    for batch in batches:
        if score is not None:
            score(run, batch)
        else:
            run.free_memory_for(run.policy)
        result = run.policy.train(batch, run.loss_fn, eval_mode=True, gbs=batch.size)
        reported = {"loss": (result["loss"], of_loss)}
        for area, unit in REPORTED.items():
            reported |= {name: (value, unit) for name, value in result["metrics"].items() if name.startswith(area)}
        for name, (value, unit) in reported.items():
            if not result[unit]:  # all rows of the batch are dropped, and their mean is undefined
                continue
            sums[name] = sums.get(name, 0.0) + value * result[unit]
            units[name] = units.get(name, 0.0) + result[unit]
        tokens += result["global_valid_toks"]
    if not sums:
        _log.warning("all validation rows are dropped, so there is no validation loss: raise policy.max_total_sequence_length")
    means = run.loss_fn.reported_metrics({name: value / units[name] for name, value in sums.items()})
    return {f"validation/{name.partition('/')[2] or name}": value for name, value in means.items()} | {
        "validation/tokens": tokens
    }
