"""Builds the learning-rate schedule that the config names; knows an optimizer of torch, and no Megatron."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl_core.config.schedules import SCHEDULES, constant
from rl_core.config.schema import SchedulerConfig
from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean


def build_scheduler(optimizer: torch.optim.Optimizer, config: SchedulerConfig | None) -> Any:
    """The schedule; it steps once an optimizer step. Constant without a config.

    Args:
        optimizer: what it acts on.
        config: `linear`, `cosine` or `constant`, or the dotted name of a schedule of torch, and its arguments.

    Raises:
        UserError: the name leads nowhere, or the schedule refuses the arguments.
    """
    if config is None:
        return LambdaLR(optimizer, constant)
    if config.name in SCHEDULES:
        shape = SCHEDULES[config.name]
        known = list(inspect.signature(shape).parameters)[1:]
        for name in config.kwargs:
            if name not in known:
                raise UserError(
                    f"`policy.scheduler.kwargs.{name}`: {config.name} takes no such argument.{did_you_mean(name, known)} It "
                    f"takes {', '.join(known)}."
                )
        return _called(partial(LambdaLR, lr_lambda=_with(shape, config)), optimizer, config, {})
    return _called(_resolved(config.name), optimizer, config, config.kwargs)


def _with(shape: Callable[..., float], config: SchedulerConfig) -> Callable[[int], float]:
    try:
        inspect.signature(shape).bind(0, **config.kwargs)
    except TypeError as error:
        raise UserError(f"`policy.scheduler.kwargs`: {config.name}: {error}.") from error
    return partial(shape, **config.kwargs)


def _resolved(dotted: str) -> Any:
    module_name, _, attribute = dotted.rpartition(".")
    if not module_name:
        raise UserError(
            f"`policy.scheduler.name`: no schedule {dotted!r}.{did_you_mean(dotted, sorted(SCHEDULES))} There are "
            f"{', '.join(sorted(SCHEDULES))}, and any dotted name such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"`policy.scheduler.name`: {dotted!r} leads nowhere: {error}.") from error


def _called(factory: Any, optimizer: torch.optim.Optimizer, config: SchedulerConfig, kwargs: Any) -> Any:
    try:
        return factory(optimizer, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"`policy.scheduler.kwargs`: {config.name} refuses {dict(kwargs)}: {error}") from error
