"""What all algorithms here have in common: likelihood of the samples with the best rewards."""

from rl_train.step import validate


def step_of(run, step, *, choose, groups=4, prepare=lambda batch: None, **options):
    """One step with the rows that `choose` returns; `options` are arguments of `train`."""
    run.metrics.add(run.weights.sync(only_if_stale=True))
    rollouts = run.rollouts.take(step, groups)
    batch = rollouts.batch.select_indices(choose(rollouts.batch))
    prepare(batch)
    run.policy.prepare_for_training()
    run.record_training(run.policy.train(batch, run.loss_fn, **options), batch)
    run.policy.finish_training()
    run.metrics.add(rollouts.metrics)
    validate(run, step)


def best(batch):
    """The eight rows with the largest rewards."""
    return batch["rewards"].argsort(descending=True, stable=True)[:8]
