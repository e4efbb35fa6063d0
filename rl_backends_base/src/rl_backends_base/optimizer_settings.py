"""The settings of an optimizer and its learning-rate schedule: builds the schedule, saves and restores both for a resume."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl_core.config.policy_sections import SCHEDULES, constant
from rl_core.config.schema import OptimizerConfig, SchedulerConfig
from rl_core.errors import CheckpointError, UserError, with_key
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.import_path import resolve


class OptimizerSettings:
    """The optimizer and schedule settings of a config, and their state after some steps. No schedule: a constant learning rate.

    A checkpoint contains the settings under which it was written. If the current ones are equal, everything continues as
    saved, bit for bit. If they differ, the current ones apply: the schedule is at the position it would have if the run had
    had them from its first step. Values in an optimizer's parameter groups other than its arguments, such as an estimated step
    size, are state and always continue.

    Attributes:
        lr_factor: factor on the learning rates of the schedule; not saved, because the run saves it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, scheduler: SchedulerConfig | None) -> None:
        self.optimizer, self._config = optimizer, config
        self._initial = _hyperparameters(optimizer)
        self._scheduler = scheduler
        self.scheduler: Any = build_scheduler(optimizer, scheduler)
        self.lr_factor = 1.0
        if config.groups and scheduler is not None:
            self._check_ratios(scheduler)

    @contextmanager
    def scaled_lr(self) -> Iterator[float]:
        """In the block, learning rates are those of the schedule times `lr_factor`; yields the highest.

        The schedule reads the unscaled ones: some compute a rate from the previous one.
        """
        groups = self.optimizer.param_groups
        unscaled = [group["lr"] for group in groups]
        if self.lr_factor != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * self.lr_factor
        try:
            yield max(float(group["lr"]) for group in groups)
        finally:
            for group, lr in zip(groups, unscaled, strict=True):
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Settings, parameter groups without their parameters, and the schedule's position."""
        return {
            "settings": self._settings(),
            "param_groups": _hyperparameters(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, steps: int, source: str) -> None:
        """Continue from `state_dict`, with the current settings.

        Args:
            saved: what `state_dict` returned.
            steps: number of optimizer steps taken until then.
            source: the checkpoint, for errors.

        Raises:
            CheckpointError: it is incomplete, or was written with another optimizer or other parameter groups.
        """
        if missing := {"settings", "param_groups", "scheduler"} - saved.keys():
            raise CheckpointError(f"{source} is damaged: its state has no `{min(missing)}`. Use another checkpoint.")
        before, now, groups = saved["settings"], self._settings(), self.optimizer.param_groups
        if (then := _fixed(before)) != (current := _fixed(now)):
            raise CheckpointError(
                f"{source} was written with the optimizer groups {then}, but the config has {current}. A resume can only "
                "change their `kwargs`. Restore `optimizer.groups`, or start a new run from the weights.",
                key="optimizer.groups",
            )
        if before["optimizer"] != now["optimizer"]:
            raise CheckpointError(
                f"{source} was written by the optimizer {before['optimizer']}, but the config has {now['optimizer']}, which "
                "cannot use its state. Restore `optimizer.name`, or start a new run from the weights.",
                key="optimizer.name",
            )
        if len(saved["param_groups"]) != len(groups):
            raise CheckpointError(
                f"{source} was written with {len(saved['param_groups'])} parameter groups, but the config has {len(groups)}. "
                "`optimizer.kwargs.decay_matrices_only` cannot change when a run is resumed. Restore it, or start a new run "
                "from the weights.",
                key="optimizer.kwargs.decay_matrices_only",
            )
        if before == now:
            for group, old in zip(groups, saved["param_groups"], strict=True):
                group.update(old)
            self.scheduler.load_state_dict(saved["scheduler"])
            return
        self._restart(steps)
        sections = [*before.get("groups", {}).values(), *now.get("groups", {}).values(), before, now]
        arguments = {key for section in sections for key in section["kwargs"]}
        arguments |= {key for part in parts_of(self.optimizer) for key in inspect.signature(type(part)).parameters}
        for group, initial, old in zip(groups, self._initial, saved["param_groups"], strict=True):
            group.update({key: value for key, value in old.items() if key in initial and key not in arguments})

    def _restart(self, steps: int) -> None:
        """Reset settings and schedule to those of the config after `steps` optimizer steps."""
        for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
            for key in group.keys() - initial.keys() - {"params"}:
                del group[key]
            group.update(deepcopy(initial))
        self.scheduler = build_scheduler(self.optimizer, self._scheduler)
        with warnings.catch_warnings():
            # PyTorch warns about a schedule that steps before its optimizer.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
            for _ in range(steps):
                self.scheduler.step()

    def _check_ratios(self, scheduler: SchedulerConfig) -> None:
        """Raise UserError if the schedule has replaced the learning rates of groups by a single one."""
        # Only schedules of torch record the rates that they scale.
        now = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        scales = {float(old["lr"]): new for old, new in zip(self._initial, now, strict=True)}
        if any(not math.isclose(a * scales[b], b * scales[a], rel_tol=1e-6) for a in scales for b in scales):
            raise UserError(
                f"`policy.scheduler.name`: {scheduler.name} sets the same learning rate for all groups of "
                f"`policy.optimizer.groups`, which have {', '.join(f'{lr:g}' for lr in scales)}. Use a schedule that scales "
                f"them: {', '.join(sorted(SCHEDULES))}, or one of torch such as StepLR.",
                key="policy.scheduler.name",
            )

    def _settings(self) -> dict[str, Any]:
        kind, groups = type(self.optimizer), self._config.groups
        own = {name: self._config.of_group(name) for name in groups}
        return {
            # The class of a part may depend on the number of ranks.
            "optimizer": self._config.name if groups else f"{kind.__module__}.{kind.__qualname__}",
            "kwargs": _plain(self._config.kwargs),
            "scheduler": None if self._scheduler is None else self._scheduler.model_dump(mode="json"),
            **(
                {"groups": {name: {"params": groups[name].params, **_plain(own[name].model_dump())} for name in own}}
                if own
                else {}
            ),
        }


def _plain(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values, default=str))


def _fixed(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a resume cannot change about groups, by name."""
    return {name: f"{each['name']} for {each['params'] or 'matrices'}" for name, each in settings.get("groups", {}).items()}


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers of an `OptimizerChain`; of any other, itself."""
    return getattr(optimizer, "parts", (optimizer,))


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    # Copies, because schedules change a learning rate that is a tensor in place.
    return [{key: deepcopy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def call_named(factory: Any, first: Any, kwargs: Mapping[str, Any], *, key: str, also: tuple[str, ...] = ()) -> Any:
    """Call `factory(first, **kwargs)`; other arguments as `check_arguments`.

    Raises:
        UserError: it is not callable, an argument is missing or unknown, or it raises on one.
    """
    if not callable(factory):
        raise UserError(f"`{key}.name`: {factory!r} cannot be called: name a class or a function.", key=f"{key}.name")
    check_arguments(factory, kwargs, key=key, num_positional=1, also=also)
    try:
        return factory(first, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"`{key}.kwargs`: {name} rejects {dict(kwargs)}: {error}", key=f"{key}.kwargs") from error


def check_arguments(
    factory: Callable[..., Any], kwargs: Mapping[str, Any], *, key: str, num_positional: int, also: tuple[str, ...] = ()
) -> None:
    """Check that `factory` accepts the keywords and gets those that it needs.

    Args:
        factory: the callable.
        kwargs: keyword arguments from the config.
        key: the config section, for errors.
        num_positional: number of arguments passed by position.
        also: keywords handled elsewhere, for the list of allowed ones.

    Raises:
        UserError: one is missing or unknown.
    """
    parameters = list(inspect.signature(factory).parameters.values())[num_positional:]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        names = [p.name for p in parameters]
        for name in kwargs:
            if name not in names:
                raise UserError(
                    f"`{key}.kwargs.{name}`: {getattr(factory, '__name__', factory)} takes no such argument."
                    f"{did_you_mean(name, [*names, *also])} It takes {', '.join([*names, *also])}.",
                    key=f"{key}.kwargs.{name}",
                )
    named = (p for p in parameters if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL))
    missing = [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in kwargs]
    if missing:
        raise UserError(f"`{key}.kwargs` is missing {', '.join(missing)}.", key=f"{key}.kwargs")


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
