"""Checks that learning-rate schedules are as long as their run, and fills in missing lengths. Does not import torch.

Covers the named schedules only. A schedule given by its path is not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rl_core.config.schedules import SCHEDULES
from rl_core.config.schema import SchedulerConfig
from rl_core.config.source_tree import KeyPath
from rl_train.config.optimizer_steps import OptimizerSteps, optimizer_steps
from rl_train.config.schema import RunConfig

LENGTH, WARMUP = "num_training_steps", "num_warmup_steps"
_TRAINED = ("policy", "value")


def schedule_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Schedules that are certain to reach a learning rate of 0 before the run ends."""
    for model, scheduler, steps in _named_schedules(run):
        length = scheduler.kwargs.get(LENGTH)
        at = (model, "scheduler", "kwargs", LENGTH)
        if length is None and LENGTH in _arguments(scheduler) and steps is None:
            yield at, f"is required: {run.algorithm_name} does not declare its number of optimizer steps."
        elif steps is not None and _is_number(length) and _is_over(scheduler, steps.fewest):
            yield at, _too_short_message(length, steps)


def schedule_warnings(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Report schedules that may end before the run, and warm-ups that do not."""
    for model, scheduler, steps in _named_schedules(run):
        if steps is None:
            continue
        length, warmup = scheduler.kwargs.get(LENGTH), scheduler.kwargs.get(WARMUP)
        at = (model, "scheduler", "kwargs")
        if _is_number(length) and _is_over(scheduler, steps.most) and not steps.is_exact:
            yield (
                (*at, LENGTH),
                f"the run may make more optimizer steps: up to {steps}. The learning rate of the additional steps is 0.",
            )
        if _is_number(warmup) and warmup >= steps.most:
            highest = _factor(scheduler, steps.most - 1, length=steps.most)
            yield (
                (*at, WARMUP),
                f"the warm-up of {warmup} optimizer steps does not end before the run, which makes {steps}: the learning rate "
                f"only reaches {highest:.0%} of `optimizer.kwargs.lr`.",
            )


def schedule_lengths(run: RunConfig) -> dict[str, int]:
    """Optimizer steps of each schedule without a configured length, which follows the length of the run, by model."""
    return {
        model: steps.most
        for model, scheduler, steps in _named_schedules(run)
        if steps is not None and LENGTH in _arguments(scheduler) and scheduler.kwargs.get(LENGTH) is None
    }


def with_schedule_lengths(run: RunConfig) -> RunConfig:
    """The run with the length of each schedule that sets none: the number of optimizer steps of the run."""
    update = {}
    for model, length in schedule_lengths(run).items():
        section = getattr(run, model)
        complete = section.scheduler.model_copy(update={"kwargs": {**section.scheduler.kwargs, LENGTH: length}})
        update[model] = section.model_copy(update={"scheduler": complete})
    return run.model_copy(update=update)


def schedule_changes(run: RunConfig, before: Mapping[str, int], done: Mapping[str, int]) -> Iterator[str]:
    """How a resume with another run length changes the schedules that follow the length of the run.

    Args:
        run: the current config.
        before: what `schedule_lengths` returned when the checkpoint was written.
        done: optimizer steps at that checkpoint, by model.
    """
    for model, length in schedule_lengths(run).items():
        if before.get(model, length) == length or model not in done:
            continue
        scheduler, lr = getattr(run, model).scheduler, getattr(run, model).optimizer.kwargs.get("lr")
        now, old = (_factor(scheduler, done[model], length=whole) for whole in (length, before[model]))
        unit, scale = ("", lr) if _is_number(lr) else (" of its highest value", 1.0)
        yield (
            f"{model}.scheduler: the {scheduler.name} schedule follows the length of the run, which is now {length} optimizer "
            f"steps and was {before[model]}. It continues at optimizer step {done[model] + 1} with a learning rate of "
            f"{scale * now:.3g}{unit}; with the previous length it would be {scale * old:.3g}. Set "
            f"{model}.scheduler.kwargs.{LENGTH} for a schedule of a fixed length."
        )


def _named_schedules(run: RunConfig) -> Iterator[tuple[str, SchedulerConfig, OptimizerSteps | None]]:
    for model in _TRAINED:
        section = getattr(run, model)
        if section is None or section.scheduler is None or section.scheduler.name not in SCHEDULES:
            continue
        steps = optimizer_steps(run, model)
        # A model without training steps has no schedule that could end. The algorithm decides whether that is allowed.
        if steps is None or steps.most > 0:
            yield model, section.scheduler, steps


def _arguments(scheduler: SchedulerConfig) -> tuple[str, ...]:
    return tuple(inspect.signature(SCHEDULES[scheduler.name]).parameters)[1:]


def _is_over(scheduler: SchedulerConfig, steps: int) -> bool:
    """Whether the learning rate is 0 in the last of this many optimizer steps."""
    return _factor(scheduler, steps - 1) == 0.0


def _factor(scheduler: SchedulerConfig, step: int, *, length: int | None = None) -> float:
    """Learning-rate factor after `step` optimizer steps. Ignores arguments that are not numbers; the backend rejects them."""
    known = {name: value for name, value in scheduler.kwargs.items() if name in _arguments(scheduler) and _is_number(value)}
    if LENGTH in _arguments(scheduler):
        known.setdefault(LENGTH, length if length is not None else step + 1)
    return SCHEDULES[scheduler.name](step, **known)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _too_short_message(length: float, steps: OptimizerSteps) -> str:
    return (
        f"the schedule ends after {length} optimizer steps, but the run makes {steps}: the learning rate would be 0 for the "
        f"last {steps.fewest - int(length)} of them. The length counts optimizer steps, not steps of the algorithm. Remove it "
        "to make the schedule as long as the run."
    )
