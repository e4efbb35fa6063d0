"""Validation between steps, the same for every algorithm: held-out prompts, held-out losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossType
from rl_core.rollouts.records import rollout_records
from rl_core.run import Run

REPORTED = "preference/"
"""Metrics of a loss that are told of held-out rows as well, as `validation/<quantity>`."""


def validate(run: Run, step: int, *, score: Callable[[BatchedDataDict[Any]], None] | None = None) -> None:
    """Validate after `step` steps if the config asks for it (0: before the first, logged as a step of its own).

    Args:
        run: the run.
        step: steps done.
        score: adds to a held-out batch what the loss reads besides the rows, in place.
    """
    if not run.validation_due(step):
        return
    with run.timed("validate"):
        if run.validation_batches is not None:
            run.metrics.add(_held_out_loss(run, score))
        if run.evaluation is not None:
            assert run.weights is not None
            run.weights.sync(only_if_stale=True)
            metrics, trajectories = run.evaluation.evaluate()
            run.metrics.add(metrics)
    if step == 0:
        if run.evaluation is not None:
            run.log_rollouts(rollout_records(trajectories), 0)
        run.flush(0)


def _held_out_loss(run: Run, score: Callable[[BatchedDataDict[Any]], None] | None) -> dict[str, float]:
    """The loss of the held-out rows: a mean over their tokens (or sequences), whatever batches they come in."""
    assert run.validation_batches is not None
    unit = "global_valid_toks" if run.loss_fn.loss_type is LossType.TOKEN_LEVEL else "global_valid_seqs"
    sums: dict[str, float] = {}
    units, tokens = 0.0, 0.0
    for batch in run.validation_batches.epoch():
        if score is not None:
            score(batch)
        result = run.policy.train(batch, run.loss_fn, eval_mode=True, gbs=batch.size)
        told = {name.removeprefix(REPORTED): v for name, v in result["metrics"].items() if name.startswith(REPORTED)}
        for name, value in {"loss": result["loss"], **told}.items():
            sums[name] = sums.get(name, 0.0) + value * result[unit]
        units += result[unit]
        tokens += result["global_valid_toks"]
    return {f"validation/{name}": value / units for name, value in sums.items()} | {"validation/tokens": tokens}
