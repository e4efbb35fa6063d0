"""Builds the optimizer and the learning-rate schedule that the config names; knows parameters, no model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl_core.config.schedules import SCHEDULES, constant
from rl_core.config.schema import OptimizerConfig, SchedulerConfig
from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""A keyword of ours in `optimizer.kwargs`: true spares biases and norms (all tensors of one axis) the weight decay."""


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters.

    Adam and AdamW of torch run fused (one pass over memory) unless `kwargs` say otherwise.

    Args:
        parameters: name to parameter, those that are stepped on.
        config: dotted name and keyword arguments.

    Raises:
        UserError: the name leads nowhere, or the optimizer refuses the arguments.
    """
    factory = resolve(config.name, key="policy.optimizer.name")
    kwargs = dict(config.kwargs)
    matrices_only = kwargs.pop(DECAY_MATRICES_ONLY, False)
    if factory in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & kwargs.keys():
        kwargs["fused"] = True
    groups: Any = list(parameters.values())
    if matrices_only:
        groups = [
            {"params": [p for p in parameters.values() if p.ndim > 1]},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    optimizer = _call(factory, groups, kwargs, key="policy.optimizer", also=(DECAY_MATRICES_ONLY,))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"`policy.optimizer.name`: {config.name} gave a {type(optimizer).__name__}, no torch optimizer.")
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: SchedulerConfig | None) -> Any:
    """The learning-rate schedule; it steps once an optimizer step. Constant without a config.

    Raises:
        UserError: the name leads nowhere, or an argument is missing or unknown.
    """
    if config is None:
        return LambdaLR(optimizer, partial(constant, num_warmup_steps=0))
    if config.name in SCHEDULES:
        shape = SCHEDULES[config.name]
        _check_arguments(shape, config.kwargs, key="policy.scheduler", given=1)
        return LambdaLR(optimizer, partial(shape, **config.kwargs))
    if "." not in config.name:
        raise UserError(
            f"`policy.scheduler.name`: no schedule {config.name!r}.{did_you_mean(config.name, sorted(SCHEDULES))} There are "
            f"{', '.join(sorted(SCHEDULES))}, and any dotted name such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )
    factory = resolve(config.name, key="policy.scheduler.name")
    scheduler = _call(factory, optimizer, dict(config.kwargs), key="policy.scheduler")
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise UserError(f"`policy.scheduler.name`: {config.name} gave a {type(scheduler).__name__}, no schedule.")
    return scheduler


def resolve(dotted: str, *, key: str) -> Any:
    """The object that a dotted name stands for.

    Raises:
        UserError: a part of it does not exist; names the nearest one that does.
    """
    module_name, _, attribute = dotted.rpartition(".")
    if not module_name:
        raise UserError(f"`{key}`: {dotted!r} is no dotted name. Write it in full, such as torch.optim.AdamW.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"`{key}`: cannot import {module_name!r} of {dotted!r}: {error}. Check its spelling, or install what it is in."
        ) from error
    if not hasattr(module, attribute):
        public = [name for name in dir(module) if not name.startswith("_")]
        raise UserError(f"`{key}`: {module_name} has no {attribute!r}.{did_you_mean(attribute, public)}")
    return getattr(module, attribute)


def _call(factory: Any, first: Any, kwargs: dict[str, Any], *, key: str, also: tuple[str, ...] = ()) -> Any:
    if not callable(factory):
        raise UserError(f"`{key}.name`: {factory!r} cannot be called.")
    _check_arguments(factory, kwargs, key=key, given=1, also=also)
    try:
        return factory(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"`{key}.kwargs`: {name} refuses {kwargs}: {error}") from error


def _check_arguments(
    factory: Callable[..., Any], kwargs: Mapping[str, Any], *, key: str, given: int, also: tuple[str, ...] = ()
) -> None:
    """Refuse keywords that `factory` does not take and ask for those that it needs; `given` come by position."""
    parameters = list(inspect.signature(factory).parameters.values())[given:]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        for name in kwargs:
            if name not in names:
                raise UserError(
                    f"`{key}.kwargs.{name}`: {getattr(factory, '__name__', factory)} takes no such argument."
                    f"{did_you_mean(name, [*names, *also])} It takes {', '.join([*names, *also])}."
                )
    named = (p for p in parameters if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if missing:
        raise UserError(f"`{key}.kwargs` lacks {', '.join(missing)}.")
