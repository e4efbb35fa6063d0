"""Saves and restores the settings of an optimizer and its learning-rate schedule; a resume may change them."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from rl_core.config.schema import OptimizerConfig, SchedulerConfig
from rl_core.errors import CheckpointError
from rl_core.training.schedules import build_scheduler


class OptimizerSettings:
    """The optimizer and schedule settings of a config, and their state after some steps. No schedule: a constant learning rate.

    A checkpoint contains the settings under which it was written. If the current ones are equal, everything continues as
    saved, bit for bit. If they differ, the current ones apply: the schedule is at the position it would have if the run had
    had them from its first step. Values in an optimizer's parameter groups other than its arguments, such as an estimated step
    size, are state and always continue.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, scheduler: SchedulerConfig | None) -> None:
        self.optimizer = optimizer
        self._initial = _hyperparameters(optimizer)
        self._kwargs = dict(config.kwargs)
        self._scheduler = scheduler
        self.scheduler: Any = build_scheduler(optimizer, scheduler)

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
        arguments = {*inspect.signature(type(self.optimizer)).parameters, *self._kwargs, *before["kwargs"]}
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

    def _settings(self) -> dict[str, Any]:
        kind = type(self.optimizer)
        return {
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "kwargs": json.loads(json.dumps(self._kwargs, default=str)),
            "scheduler": None if self._scheduler is None else self._scheduler.model_dump(mode="json"),
        }


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    # Copies, because schedules change a learning rate that is a tensor in place.
    return [{key: deepcopy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
