"""Optimizers and learning-rate schedules: names, arguments and ranges of values, which are checked without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rl_core.config.diagnostics import Problem, show
from rl_core.config.policy_sections import SCHEDULES, OptimizerConfig, PolicyConfig, SchedulerConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.import_path import missing_target
from rl_train.config.foreign_names import MEANINGS
from rl_train.config.rules.models import MODELS, each_model
from rl_train.config.rules.rule import TRAINING, CheckedConfig, rule
from rl_train.config.schedule_lengths import LENGTH, arguments, is_number
from rl_train.config.torch_arguments import (
    DECAY_MATRICES_ONLY,
    LR_SCHEDULER,
    OPTIM,
    SCHEDULERS,
    UNUSABLE_OPTIMIZERS,
    UNUSABLE_SCHEDULERS,
    arguments_of,
)


@rule(*(f"{name}.optimizer" for name in MODELS), applies_to=TRAINING, each=each_model)
def optimizer_can_be_created(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The optimizer of a trained model exists, and its arguments have values that it accepts."""
    if not model.frozen:
        yield from _optimizer_problems(model.optimizer, (name, "optimizer"))


@rule(*(f"{name}.scheduler" for name in MODELS), applies_to=TRAINING, each=each_model)
def schedule_can_be_created(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The learning-rate schedule of a trained model exists, and its arguments have values that it accepts."""
    if not model.frozen and model.scheduler is not None:
        yield from _scheduler_problems(model.scheduler, (name, "scheduler"))


@rule(
    *(f"{name}.{key}" for name in MODELS for key in ("frozen", "optimizer", "scheduler")), applies_to=TRAINING, each=each_model
)
def frozen_models_have_no_optimizer(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """A model that is never trained has neither an optimizer nor a schedule."""
    # By value: a resolved config states every default.
    for key, default in (("optimizer", OptimizerConfig()), ("scheduler", None)):
        if model.frozen and getattr(model, key) != default:
            yield Problem((name, key), "has no effect, since this model is never trained: remove the section.")


def allowed_argument(path: KeyPath) -> str | None:
    """The allowed values of an argument of an optimizer or schedule; None for other keys and for unknown arguments."""
    if len(path) < 3 or path[-2] != "kwargs":
        return None
    check = {"optimizer": _OPTIMIZER_VALUES, "scheduler": _SCHEDULE_VALUES}.get(str(path[-3]), {}).get(str(path[-1]))
    return None if check is None else check[1]


def _optimizer_problems(optimizer: OptimizerConfig, at: KeyPath) -> Iterator[Problem]:
    if (problem := missing_target(optimizer.name)) is not None:
        yield Problem((*at, "name"), f"{optimizer.name} cannot be imported: {problem}")
        return
    name = _class_of(optimizer.name, OPTIM)
    if name in UNUSABLE_OPTIMIZERS:
        unusable = UNUSABLE_OPTIMIZERS[name]
        yield Problem((*at, "name"), f"{optimizer.name} cannot be used to train a language model: {unusable}.")
        return
    if name and (torch_arguments := arguments_of(OPTIM, name)) is not None:
        allowed = (*torch_arguments[0], *torch_arguments[1], DECAY_MATRICES_ONLY)
        yield from _unknown(optimizer.kwargs, allowed, at, of=optimizer.name)
    yield from _bad_values(optimizer.kwargs, at, checks=_OPTIMIZER_VALUES)


def _scheduler_problems(scheduler: SchedulerConfig, at: KeyPath) -> Iterator[Problem]:
    name = scheduler.name
    if name in SCHEDULES:
        yield from _unknown(scheduler.kwargs, arguments(scheduler), at, of=f"the schedule {name}")
        yield from _bad_values(scheduler.kwargs, at, checks=_SCHEDULE_VALUES)
        return
    if "." not in name and ":" not in name:
        meant = did_you_mean(name, [*SCHEDULES, *SCHEDULERS])
        yield Problem(
            (*at, "name"),
            f"unknown schedule {name!r}.{meant} Use {', '.join(sorted(SCHEDULES))}, or a dotted name such as "
            f"{LR_SCHEDULER}.CosineAnnealingLR.",
        )
        return
    if (problem := missing_target(name)) is not None:
        yield Problem((*at, "name"), f"{name} cannot be imported: {problem}")
        return
    short = _class_of(name, LR_SCHEDULER)
    if short in UNUSABLE_SCHEDULERS:
        instead = f"Use {', '.join(sorted(SCHEDULES))}."
        yield Problem((*at, "name"), f"{name} cannot be used as a schedule: {UNUSABLE_SCHEDULERS[short]}. {instead}")
    elif short and (torch_arguments := arguments_of(LR_SCHEDULER, short)) is not None:
        required, optional = torch_arguments
        yield from _unknown(scheduler.kwargs, (*required, *optional), at, of=name)
        for key in required:
            if key not in scheduler.kwargs:
                yield Problem((*at, "kwargs", key), f"is required by {name}.", is_missing=True)


def _class_of(name: str, module: str) -> str:
    """The class of a module that a dotted name refers to; '' for anything else."""
    holder, _, short = name.replace(":", ".").rpartition(".")
    return short if holder == module else ""


def _unknown(kwargs: Mapping[str, Any], allowed: Collection[str], at: KeyPath, *, of: str) -> Iterator[Problem]:
    for key in kwargs:
        if key not in allowed:
            meant = f" Did you mean {MEANINGS[key]!r}?" if MEANINGS.get(key) in allowed else did_you_mean(key, list(allowed))
            yield Problem(
                (*at, "kwargs", key),
                f"{of} has no argument {key!r}.{meant} Its arguments are: {', '.join(allowed)}.",
            )


def _bad_values(kwargs: Mapping[str, Any], at: KeyPath, *, checks: Mapping[str, _Check]) -> Iterator[Problem]:
    for key, (fits, allowed) in checks.items():
        if key in kwargs and not fits(kwargs[key]):
            yield Problem((*at, "kwargs", key), f"must be {allowed}; found {show(kwargs[key])}.")


def _is_not_negative(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _is_step_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


_Check = tuple[Callable[[Any], bool], str]
_NOT_NEGATIVE: _Check = (_is_not_negative, "a number, 0 or more")
_OPTIMIZER_VALUES: dict[str, _Check] = {
    "lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "momentum": _NOT_NEGATIVE,
    # Adafactor has two values, of which one may be null.
    "eps": (lambda value: isinstance(value, list | tuple) or _is_not_negative(value), "a number, 0 or more"),
    "betas": (
        lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_fraction, value)),
        "a list of two numbers, each 0 or more and less than 1",
    ),
    DECAY_MATRICES_ONLY: (lambda value: isinstance(value, bool), "true or false"),
}
_STEPS: _Check = (_is_step_count, "a whole number of optimizer steps, 0 or more")
_SCHEDULE_VALUES: dict[str, _Check] = {
    LENGTH: _STEPS,
    "num_warmup_steps": (lambda value: value is not None and _is_step_count(value), _STEPS[1]),
    "min_lr_ratio": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
}
