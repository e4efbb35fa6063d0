"""Validation between steps, the same for every algorithm: held-out prompts, held-out losses."""

from __future__ import annotations

from rl_core.rollouts.records import rollout_records
from rl_core.run import Run


def validate(run: Run, step: int) -> None:
    """Validate after `step` steps if the config asks for it (0: before the first, logged as a step of its own)."""
    if not run.validation_due(step):
        return
    with run.timed("validate"):
        if run.validation_batches is not None:
            run.metrics.add(_held_out_loss(run))
        if run.evaluation is not None:
            assert run.weights is not None
            run.weights.sync(only_if_stale=True)
            metrics, trajectories = run.evaluation.evaluate()
            run.metrics.add(metrics)
    if step == 0:
        if run.evaluation is not None:
            run.log_rollouts(rollout_records(trajectories), 0)
        run.flush(0)


def _held_out_loss(run: Run) -> dict[str, float]:
    """The loss of the held-out rows: a mean over their tokens, whatever batches they come in."""
    assert run.validation_batches is not None
    total, tokens = 0.0, 0.0
    for batch in run.validation_batches.epoch():
        result = run.policy.train(batch, run.loss_fn, eval_mode=True, gbs=batch.size)
        total += result["loss"] * result["global_valid_toks"]
        tokens += result["global_valid_toks"]
    return {"validation/loss": total / tokens, "validation/tokens": tokens}
