"""Learning-rate schedules that are as long as their run. Schedules given by their path are not checked."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import SchedulerConfig
from rl_train.config.optimizer_steps import optimizer_steps
from rl_train.config.rules.rule import TRAIN_ONLY, TRAINING, CheckedConfig, rule
from rl_train.config.schedule_lengths import LENGTH, TRAINED, arguments, factor, is_number, named_schedules
from rl_train.config.schema import RunConfig

WARMUP = "num_warmup_steps"
_READS = ("algorithm", *(f"{name}.scheduler" for name in TRAINED), "policy.train_global_batch_size", "cluster", "data")


@rule(*_READS, applies_to=TRAINING)
def schedules_last_until_the_end(config: CheckedConfig) -> Iterator[Problem]:
    """A learning-rate schedule is not certain to reach 0 before the run ends."""
    yield from schedule_problems(config.run)


def schedule_problems(run: RunConfig) -> Iterator[Problem]:
    """Schedules that are certain to reach a learning rate of 0 before the run ends."""
    for model, scheduler, steps in named_schedules(run):
        length = scheduler.kwargs.get(LENGTH)
        at = (model, "scheduler", "kwargs", LENGTH)
        if length is None and LENGTH in arguments(scheduler) and steps is None:
            yield Problem(
                at, f"is required. {run.algorithm_name} does not declare its number of optimizer steps.", is_missing=True
            )
        elif steps is not None and is_number(length) and _is_over(scheduler, steps.fewest):
            yield Problem(
                at,
                f"the schedule ends after {length} optimizer steps, but the run makes {steps}: the learning rate would be 0 "
                f"for the last {steps.fewest - int(length)} of them. The length counts optimizer steps, not steps of the "
                "algorithm. Remove it to make the schedule as long as the run.",
            )


@rule(*_READS, applies_to=TRAIN_ONLY, warns=True)
def schedules_fit_the_run(config: CheckedConfig) -> Iterator[Problem]:
    """A learning-rate schedule does not end before the run, and its warm-up does. With data, a later rule knows more."""
    yield from schedule_warnings(config.run)


@rule(
    "algorithm", *(f"{name}.train_global_batch_size" for name in TRAINED), "cluster", "data", applies_to=TRAIN_ONLY, warns=True
)
def optimizer_steps_have_equal_rows(config: CheckedConfig) -> Iterator[Problem]:
    """The optimizer steps of a step have the same number of rows."""
    for model in TRAINED:
        steps = optimizer_steps(config.run, model)
        if steps is not None and steps.per_pass > 1 and steps.plan.is_exact and (rest := steps.plan.rows % steps.rows):
            yield Problem(
                (model, "train_global_batch_size"),
                f"the {steps.plan.rows} rows of a step are not a multiple of {steps.rows}: the last of {steps.per_pass} "
                f"optimizer steps has {rest} rows, which count as much as the {steps.rows} rows of the others. Choose a "
                f"divisor of {steps.plan.rows}.",
            )


def schedule_warnings(run: RunConfig) -> Iterator[Problem]:
    """Schedules that may end before the run, and warm-ups that do not."""
    for model, scheduler, steps in named_schedules(run):
        if steps is None:
            continue
        length, warmup = scheduler.kwargs.get(LENGTH), scheduler.kwargs.get(WARMUP)
        at = (model, "scheduler", "kwargs")
        if is_number(length) and _is_over(scheduler, steps.most) and not steps.is_exact:
            yield Problem(
                (*at, LENGTH),
                f"the run may make more optimizer steps: up to {steps}. The learning rate of the additional steps is 0.",
            )
        if is_number(warmup) and warmup >= steps.most:
            highest = factor(scheduler, steps.most - 1, length=steps.most)
            yield Problem(
                (*at, WARMUP),
                f"the warm-up of {warmup} optimizer steps does not end before the run, which makes {steps}: the learning rate "
                f"only reaches {highest:.0%} of `optimizer.kwargs.lr`.",
            )


def _is_over(scheduler: SchedulerConfig, steps: int) -> bool:
    """Whether the learning rate is 0 in the last of this many optimizer steps."""
    return factor(scheduler, steps - 1) == 0.0
