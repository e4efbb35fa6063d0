"""Builds the learning-rate schedule of the config for any torch optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl_core.config.schedules import SCHEDULES, constant
from rl_core.config.schema import SchedulerConfig
from rl_core.errors import UserError, with_key
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.import_path import resolve
from rl_core.training.named import call_named, check_arguments


def build_scheduler(optimizer: torch.optim.Optimizer, config: SchedulerConfig | None) -> Any:
    """The learning-rate schedule; it steps once per optimizer step. Constant without a config.

    Raises:
        UserError: the name does not exist, or an argument is missing or unknown.
    """
    if config is None:
        return LambdaLR(optimizer, constant)
    if config.name in SCHEDULES:
        shape = SCHEDULES[config.name]
        check_arguments(shape, config.kwargs, key="policy.scheduler", num_positional=1)
        return LambdaLR(optimizer, partial(shape, **config.kwargs))
    if "." not in config.name:
        raise UserError(
            f"`policy.scheduler.name`: no schedule {config.name!r}.{did_you_mean(config.name, sorted(SCHEDULES))} Use one of "
            f"{', '.join(sorted(SCHEDULES))}, or any dotted path such as torch.optim.lr_scheduler.CosineAnnealingLR.",
            key="policy.scheduler.name",
        )
    with with_key("policy.scheduler.name"):
        factory = resolve(config.name, key="policy.scheduler.name")
    scheduler = call_named(factory, optimizer, dict(config.kwargs), key="policy.scheduler")
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise UserError(
            f"`policy.scheduler.name`: {config.name} returned a {type(scheduler).__name__}, not a schedule.",
            key="policy.scheduler.name",
        )
    return scheduler
