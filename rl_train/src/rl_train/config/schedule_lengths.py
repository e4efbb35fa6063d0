"""Learning-rate schedules over the optimizer steps of a run; fills in missing lengths. Does not import torch.

Covers the named schedules only, not those given by their path.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rl_core.config.policy_sections import SCHEDULES
from rl_core.config.schema import SchedulerConfig
from rl_train.config.optimizer_steps import OptimizerSteps, optimizer_steps
from rl_train.config.schema import RunConfig

LENGTH = "num_training_steps"
TRAINED = ("policy", "value")
"""Sections of models that can be trained."""


def schedule_lengths(run: RunConfig) -> dict[str, int]:
    """Optimizer steps of each schedule without a configured length, which follows the length of the run, by model."""
    return {
        model: steps.most
        for model, scheduler, steps in named_schedules(run)
        if steps is not None and LENGTH in arguments(scheduler) and scheduler.kwargs.get(LENGTH) is None
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
        now, old = (factor(scheduler, done[model], length=whole) for whole in (length, before[model]))
        unit, scale = ("", lr) if is_number(lr) else (" of its highest value", 1.0)
        yield (
            f"{model}.scheduler: the {scheduler.name} schedule follows the length of the run, which is now {length} optimizer "
            f"steps and was {before[model]}. It continues at optimizer step {done[model] + 1} with a learning rate of "
            f"{scale * now:.3g}{unit}; with the previous length it would be {scale * old:.3g}. Set "
            f"{model}.scheduler.kwargs.{LENGTH} for a schedule of a fixed length."
        )


def named_schedules(run: RunConfig) -> Iterator[tuple[str, SchedulerConfig, OptimizerSteps | None]]:
    """The named schedules of the trained models: section, schedule, and the optimizer steps of the model, None if unknown."""
    for model in TRAINED:
        section = getattr(run, model)
        if section is None or section.scheduler is None or section.scheduler.name not in SCHEDULES:
            continue
        steps = optimizer_steps(run, model)
        # A model without training steps has no schedule that could end. The algorithm decides whether that is allowed.
        if steps is None or steps.most > 0:
            yield model, section.scheduler, steps


def arguments(scheduler: SchedulerConfig) -> tuple[str, ...]:
    """The arguments of a named schedule."""
    return tuple(inspect.signature(SCHEDULES[scheduler.name]).parameters)[1:]


def factor(scheduler: SchedulerConfig, step: int, *, length: int | None = None) -> float:
    """Learning-rate factor after `step` optimizer steps. Ignores arguments that are not numbers; the backend rejects them."""
    known = {name: value for name, value in scheduler.kwargs.items() if name in arguments(scheduler) and is_number(value)}
    if LENGTH in arguments(scheduler):
        known.setdefault(LENGTH, length if length is not None else step + 1)
    return SCHEDULES[scheduler.name](step, **known)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)
