"""Run event hooks of plugins and callbacks, and the control of a run by what they return after a step; early stopping.

A callback is an object with run event hooks, as the module of a plugin has them. A control applies before the next step and
is saved in checkpoints, so that a resumed run continues with the learning rate and the KL weight that were set.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from pydantic import ValidationError

from rl_core.errors import ConfigError, RLCoreError, UserError, with_key
from rl_core.plugins import Control, hookimpl, hookspecs
from rl_core.plugins.component import Plugin, describe, did_you_mean
from rl_core.plugins.import_path import resolve
from rl_core.plugins.manager import DISABLE_VARIABLE, PluginManager
from rl_train.config.rules.ranking import may_write
from rl_train.config.schema import RunConfig, StopConfig
from rl_train.errors import PluginHookError, reporting_errors

_log = logging.getLogger("rlcore")
EVENT_HOOKS = ("rlcore_run_started", "rlcore_step_finished", "rlcore_run_finished")
_Run = Any
"""A `rl_train.run.Run`; its module imports this one."""
_KL_WEIGHT = "reference_policy_kl_penalty"


class Callback(Plugin):
    """A callback of one run; `name` is its key in the config."""

    @property
    def label(self) -> str:
        """Its import path."""
        return self.module


def who(plugin: Plugin) -> str:
    """A plugin or a callback in messages."""
    return f"the {'callback' if isinstance(plugin, Callback) else 'plugin'} {plugin.name!r} ({plugin.label})"


def call_event(manager: PluginManager, event: str, /, **arguments: Any) -> list[tuple[Plugin, Any]]:
    """Call one event hook of every working plugin and callback, the last registered first.

    The remaining plugins are called even if one raises.

    Args:
        manager: The plugins.
        event: The name of the hook: 'rlcore_run_started', 'rlcore_step_finished' or 'rlcore_run_finished'.
        **arguments: All arguments of the hook's specification.

    Returns:
        What they returned, apart from None.

    Raises:
        PluginHookError: Plugins raised; the error names each one, its distribution and its exception.
        ValueError: The event hook does not exist, or the arguments do not match its specification.
    """
    if event not in EVENT_HOOKS:
        raise ValueError(f"There is no event hook {event!r}.")
    parameters = set(inspect.signature(getattr(hookspecs, event)).parameters)
    if set(arguments) != parameters:
        raise ValueError(f"{event} takes {sorted(parameters)}, not {sorted(arguments)}.")
    failures: list[tuple[Plugin, Exception]] = []
    returned: list[tuple[Plugin, Any]] = []
    for plugin, implementation in manager.event_hooks(event):
        try:
            value = implementation.function(*(arguments[name] for name in implementation.argnames))
        except Exception as error:
            failures.append((plugin, error))
        else:
            returned += [(plugin, value)] if value is not None else []
    if failures:
        raise _hook_error(event, failures) from failures[0][1]
    return returned


def _hook_error(event: str, failures: Sequence[tuple[Plugin, Exception]]) -> UserError:
    if len(failures) == 1 and isinstance(failures[0][1], ConfigError) and isinstance(failures[0][0], Callback):
        return failures[0][1]
    raised = [f"{event} of {who(plugin)} raised {describe(error)}." for plugin, error in failures]
    callbacks = ", ".join(plugin.name for plugin, _ in failures if isinstance(plugin, Callback))
    names = ",".join(plugin.name for plugin, _ in failures if not isinstance(plugin, Callback))
    remedies = [f"To run without it: {DISABLE_VARIABLE}={names}"] if names else []
    remedies += [f"To run without it, remove {callbacks} from the config."] if callbacks else []
    return PluginHookError("\n".join([*raised, *remedies]))


@contextmanager
def run_events(run: _Run, manager: PluginManager) -> Iterator[None]:
    """Report the start and the end of a run, which is the block, to the plugins; the end with its error if there is one."""
    call_event(manager, "rlcore_run_started", run=run)
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        call_event(manager, "rlcore_run_finished", run=run, error=error)


def callbacks_of(config: RunConfig) -> dict[str, Any]:
    """The callbacks of a config by their keys, created.

    Raises:
        ConfigError: one cannot be imported or created.
    """
    callbacks: dict[str, Any] = {}
    if config.stop.metric_name is not None:
        callbacks["stop"] = EarlyStopping(**config.stop.model_dump())
    for name, section in config.callbacks.items():
        key = f"callbacks.{name}"
        callbacks[key] = target = resolve(section.name, key=f"{key}.name")
        if inspect.isclass(target):
            with with_key(key), reporting_errors(section.name, target):
                callbacks[key] = target(**section.kwargs)
        elif section.kwargs:
            raise ConfigError(f"{section.name} is not a class, so `kwargs` has no effect: remove it.", key=f"{key}.kwargs")
    return callbacks


def add_callbacks(manager: PluginManager, callbacks: Mapping[str, Any]) -> None:
    """Add callbacks to the event hooks of a manager; as those of plugins, the last one is called first.

    Raises:
        ConfigError: one has no event hook or a misspelled one, or only one of the methods for its state.
    """
    for key, callback in callbacks.items():
        _add_callback(manager, key, callback)


def _add_callback(manager: PluginManager, key: str, callback: Any) -> None:
    hooked = SimpleNamespace(rlcore_step_finished=hookimpl(callback)) if inspect.isroutine(callback) else callback
    kind: Any = callback if inspect.isroutine(callback) else type(callback)
    plugin = Callback(name=key, distribution="", version="", module=f"{kind.__module__}.{kind.__qualname__}")
    manager.load(plugin, lambda: hooked)
    manager.plugins.remove(plugin)  # these are the installed ones
    methods = [name for name in ("state_dict", "load_state_dict") if hasattr(callback, name)]
    problem = plugin.reason
    if problem is None and (not plugin.hooks or {*plugin.hooks} - {*EVENT_HOOKS}):
        problem = f"it must have methods marked with @hookimpl, of these names only: {', '.join(EVENT_HOOKS)}"
    elif problem is None and len(methods) == 1:
        problem = f"it has only {methods[0]}, but state needs both state_dict and load_state_dict"
    if problem is not None:
        raise ConfigError(f"{plugin.label} is not a callback: {problem}.", key=key)


def keep_state(run: _Run, callbacks: Mapping[str, Any]) -> None:
    """Save the state of callbacks that have one in the checkpoints of a run, and restore it if the run was resumed."""
    for key, callback in callbacks.items():
        if hasattr(callback, "state_dict"):
            state = _CallbackState(key, callback)
            state.state_dict()  # before the first step, to find one that JSON cannot represent
            run.keep(key, state)


@dataclass(frozen=True)
class _CallbackState:
    """The state of a callback; errors name its key."""

    key: str
    callback: Any

    def state_dict(self) -> dict[str, Any]:
        with reporting_errors(f"`{self.key}`: saving the state", type(self.callback)):
            state: dict[str, Any] = json.loads(json.dumps(self.callback.state_dict()))
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with reporting_errors(f"`{self.key}`: loading the state", type(self.callback)):
            self.callback.load_state_dict(state)


@dataclass
class RunControl:
    """What controls have changed in a run."""

    lr_factor: float | None = None
    """Factor on the policy's learning rate; None if none was set."""
    kl_weight: float | None = None
    """Weight of the KL penalty; None if none was set, and for one that `loss_fn.adaptive_kl` adapts."""
    stopped: str | None = None
    """After which step, by which plugin or callback, and why the run ends before its last step."""
    is_due: bool = False
    """Whether a control asks for a checkpoint of this step."""
    in_reward: Any = field(default=None, init=False)
    """The `KLInReward` of the algorithm; None if it has none."""

    def metrics(self) -> dict[str, float]:
        """What was set, as metrics of each step from then on."""
        values = {"control/lr_factor": self.lr_factor, "kl/penalty_weight": self.kl_weight}
        return {name: value for name, value in values.items() if value is not None}

    def apply(self, run: _Run, step: int, returned: Sequence[tuple[Plugin, Any]]) -> None:
        """Apply what `rlcore_step_finished` returned after a step.

        Raises:
            PluginHookError: a value is not a `Control`, two contradict each other, or one cannot have an effect.
        """
        controls = _checked(returned, step)
        for by, factor in _agreed(controls, "lr_factor", step):
            if factor != self.lr_factor:
                self._set_lr_factor(run, factor, by)
                _log.info("step %d: %s sets the learning rate to %g times that of the config", step, by, factor)
        for by, weight in _agreed(controls, "kl_weight", step):
            if weight != self.kl_weight:
                if (problem := self._set_kl_weight(run, weight)) is not None:
                    raise PluginHookError(f"After step {step}, {by} set kl_weight to {weight:g}, but {problem}.")
                _log.info("step %d: %s sets the weight of the KL penalty to %g", step, by, weight)
        self.is_due = False
        for by, control in controls:
            if control.save and run.checkpoints is None:
                raise PluginHookError(f"{by} asked for a checkpoint of step {step}, but checkpointing.enabled is false.")
            if control.stop is not None and self.stopped is None and step < run.config.algorithm.max_num_steps:
                self.stopped = f"stopped after step {step} by {by}: {control.stop.strip()}"
                _log.info("%s", self.stopped)
            elif control.save:
                _log.info("step %d: %s asks for a checkpoint", step, by)
            self.is_due |= control.save or self.stopped is not None

    def use_penalty(self, penalty: Any) -> None:
        """Control the weight of a `KLInReward`."""
        self.in_reward = penalty
        if self.kl_weight is not None:
            penalty.weight = self.kl_weight

    def continue_resumed(self, run: _Run) -> list[str]:
        """Apply to a resumed run what was set before; the lines say what."""
        lines = [] if self.stopped is None else [f"this run was {self.stopped}. It continues."]
        self.stopped = None
        if self.lr_factor is not None:
            self._set_lr_factor(run, self.lr_factor, "this run")
            lines.append(f"the learning rate is {self.lr_factor:g} times that of the config, as a callback or plugin set it")
        weight, in_reward = self.kl_weight, getattr(run.config.loss_fn, "use_kl_in_reward", False)
        if weight is not None and not in_reward and self._set_kl_weight(run, weight) is not None:
            self.kl_weight = None  # the config has no penalty any more
        if self.kl_weight is not None:
            lines.append(f"the weight of the KL penalty is {self.kl_weight:g}, as a callback or plugin set it")
        return lines

    def undo(self, run: _Run) -> None:
        """Reset the policy and the loss, which may be trained with again."""
        if self.lr_factor is not None:
            self._set_lr_factor(run, 1.0, "this run")
        if self.kl_weight is not None and self.in_reward is None:
            self._set_kl_weight(run, getattr(run.config.loss_fn, _KL_WEIGHT))

    def state_dict(self) -> dict[str, Any]:
        """What was set, and why the run ended."""
        return {"lr_factor": self.lr_factor, "kl_weight": self.kl_weight, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; `continue_resumed` applies it."""
        self.lr_factor, self.kl_weight, self.stopped = state["lr_factor"], state["kl_weight"], state["stopped"]

    def _set_lr_factor(self, run: _Run, factor: float, by: str) -> None:
        try:
            run.policy.set_lr_factor(factor)
        except RLCoreError as error:
            raise PluginHookError(f"{by} set lr_factor to {factor:g}, which failed: {error.__cause__ or error}") from error
        self.lr_factor = factor

    def _set_kl_weight(self, run: _Run, weight: float) -> str | None:
        """Set the weight, or say why it cannot have an effect."""
        if self.in_reward is not None:
            self.in_reward.weight = weight
            self.kl_weight = weight if self.in_reward.controller is None else None
            return None
        section, loss_fn = run.config.loss_fn, cast(Any, run.loss_fn)
        if not getattr(section, _KL_WEIGHT, 0.0) or getattr(section, "use_kl_in_reward", False):
            return f"the run has no KL penalty whose weight could change: set loss_fn.{_KL_WEIGHT} above 0"
        try:
            loss_fn.config = type(loss_fn.config).model_validate({**loss_fn.config.model_dump(), _KL_WEIGHT: weight})
        except ValidationError as error:
            return f"loss_fn.{_KL_WEIGHT} cannot have that value: {error.errors()[0]['msg']}"
        self.kl_weight = weight
        return None


def _checked(returned: Sequence[tuple[Plugin, Any]], step: int) -> list[tuple[str, Control]]:
    for plugin, value in returned:
        if not isinstance(value, Control):
            raise PluginHookError(
                f"rlcore_step_finished of {who(plugin)} returned {value!r} after step {step}. It must return a "
                "rl_core.plugins.Control, or None."
            )
    return [(who(plugin), control) for plugin, control in returned]


def _agreed(controls: Sequence[tuple[str, Control]], name: str, step: int) -> list[tuple[str, float]]:
    """Who set a value first, and the value; empty if nobody did.

    Raises:
        PluginHookError: two set different values.
    """
    given = [(by, value) for by, control in controls if (value := getattr(control, name)) is not None]
    for by, value in given[1:]:
        if value != given[0][1]:
            raise PluginHookError(
                f"After step {step}, {given[0][0]} set {name} to {given[0][1]:g} and {by} to {value:g}. Remove one of them."
            )
    return given[:1]


class EarlyStopping:
    """Stops a run when a metric has not improved for some values: the section `stop`, whose keys are the arguments."""

    def __init__(self, *, metric_name: str, **settings: Any) -> None:
        self._config, self._metric = StopConfig(metric_name=metric_name, **settings), metric_name
        self._best: float | None = None
        self._best_step = self._without_improvement = 0
        self._is_written = False

    @hookimpl
    def rlcore_step_finished(self, run: Any, step: int, metrics: Mapping[str, float]) -> Control | None:
        """Count a value, and stop after `patience` values without improvement; NaN is none.

        Raises:
            ConfigError: the run does not write the metric.
        """
        config, name = self._config, self._metric
        if name not in metrics:
            self._refuse_unknown(name, run, step, metrics)
            return None
        self._is_written, value = True, metrics[name]
        sign = 1.0 if config.mode == "max" else -1.0
        if math.isfinite(value) and (self._best is None or sign * (value - self._best) > config.min_delta):
            self._best, self._best_step, self._without_improvement = value, step, 0
            return None
        self._without_improvement += 1
        if self._without_improvement < config.patience:
            return None
        self._without_improvement = 0  # for a resume that continues the run
        best = "no value was finite" if self._best is None else f"the best is {self._best:.6g} at step {self._best_step}"
        more = f" by more than {config.min_delta:g}" if config.min_delta else ""
        return Control(stop=f"{name} did not improve{more} in {config.patience} successive values; {best}")

    def _refuse_unknown(self, name: str, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Refuse a metric that only user code could write, after a step that trained, or validated on the metric's data."""
        area, is_expected = name.rpartition("/")[0], "loss" in metrics
        if name.startswith("validation/"):
            written = {one.rpartition("/")[0] for one in metrics if one.startswith("validation/")}
            areas = {f"validation/{each.name}".rstrip("/") for each in run.validation_sets}
            is_expected = area in written or bool(written and area not in areas)
        if is_expected and not self._is_written and not may_write(run.config, name):
            hint = did_you_mean(name, metrics)
            raise ConfigError(f"step {step} has no metric {name!r}.{hint} docs/metrics.md lists all.", key="stop.metric_name")

    @hookimpl
    def rlcore_run_finished(self, error: BaseException | None) -> None:
        """Warn if the run has never written the metric."""
        if error is None and not self._is_written:
            _log.warning("early stopping had no effect: the run has not written the metric %s", self._metric)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far, and the number of values since then."""
        state = {"best": self._best, "best_step": self._best_step, "without_improvement": self._without_improvement}
        return {**state, "metric": [self._metric, self._config.mode]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, unless it is of another metric."""
        if state["metric"] == [self._metric, self._config.mode]:
            self._best, self._best_step = state["best"], state["best_step"]
            self._without_improvement, self._is_written = state["without_improvement"], state["best"] is not None
