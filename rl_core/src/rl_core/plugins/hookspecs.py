"""Specifications of the hooks that a plugin may implement. A hook may declare fewer arguments than its specification.

Component hooks take no arguments and return components. They are called once, at discovery, in the process of the `rlcore`
command; nothing else of the distribution is imported then. If one raises, the plugin gets the status `failed`, other plugins
are not affected, and using the plugin's components is an error. Example:

    >>> @hookimpl
    ... def rlcore_policies() -> list[Component]:
    ...     return [
    ...         Component(
    ...             "acme",
    ...             target="rl_backends_acme.policy:AcmePolicy",
    ...             config="rl_backends_acme.config:AcmePolicyConfig",
    ...             summary="Acme's trainer, one process",
    ...         )
    ...     ]

Run event hooks report the progress of a run. They are called in the driver process, never in a worker; the run waits for them.
If one raises, the hooks of other plugins are still called, then the run stops with an error that names the plugin and its
distribution. `rlcore_step_finished` may return a `Control`, the others return nothing. Example:

    >>> @hookimpl
    ... def rlcore_step_finished(step: int, metrics: Mapping[str, float]) -> Control | None:
    ...     return Control(stop="solved") if metrics["reward/mean"] > 0.99 else None
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from rl_core.plugins.component import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from rl_core.plugins.component import Component, KnownComponent

PROJECT = "rl_core"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

KIND_OF_HOOK = {
    "rlcore_policies": Kind.POLICY,
    "rlcore_generations": Kind.GENERATION,
    "rlcore_environments": Kind.ENVIRONMENT,
    "rlcore_algorithms": Kind.ALGORITHM,
    "rlcore_losses": Kind.LOSS,
    "rlcore_datasets": Kind.DATASET,
    "rlcore_loggers": Kind.LOGGER,
    "rlcore_weight_transports": Kind.WEIGHT_TRANSPORT,
    "rlcore_sandboxes": Kind.SANDBOX,
    "rlcore_model_servers": Kind.MODEL_SERVER,
    "rlcore_commands": Kind.COMMAND,
}
"""Maps each component hook to the kind of the components that it returns."""


class RunInfo(Protocol):
    """Read-only view of a run, passed to the event hooks.

    Attributes:
        config: The whole config, a frozen pydantic model.
        folder: The run folder: config, metrics, rollouts and checkpoints.
        first_step: Number of steps done before this run was resumed; 0 for a new run.
    """

    config: Any
    folder: Path
    first_step: int


@dataclass(frozen=True, kw_only=True)
class Control:
    """What a run should do after a step; fields that are not set change nothing. An invalid value is a ValueError."""

    stop: str | None = None
    """The reason to end the run like a finished one, with a checkpoint."""
    save: bool = False
    """Whether to save a checkpoint of this step."""
    lr_factor: float | None = None
    """Factor on the policy's learning rate, as set by its config and schedule, from the next step on; 0 or more."""
    kl_weight: float | None = None
    """Weight of the KL penalty from the next step on, instead of `loss_fn.reference_policy_kl_penalty`; 0 or more."""

    def __post_init__(self) -> None:
        if self.stop is not None and not (isinstance(self.stop, str) and self.stop.strip()):
            raise ValueError(f"Control.stop must be the reason as text, or None; found {self.stop!r}.")
        for name, value in (("lr_factor", self.lr_factor), ("kl_weight", self.kl_weight)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < math.inf):
                raise ValueError(f"Control.{name} must be a finite number, 0 or more, or None; found {value!r}.")


@hookspec
def rlcore_policies() -> Iterable[Component]:
    """Policy backends, which train a model: subclasses of `rl_core.interfaces.policy.PolicyInterface`."""


@hookspec
def rlcore_generations() -> Iterable[Component]:
    """Generation backends, which sample completions: subclasses of `rl_core.interfaces.generation.GenerationInterface`."""


@hookspec
def rlcore_environments() -> Iterable[Component]:
    """Environments, which score rollouts: subclasses of `rl_core.interfaces.environment.EnvironmentInterface`."""


@hookspec
def rlcore_algorithms() -> Iterable[Component]:
    """Algorithms: functions `train(config, run)`. The component name is the name of the YAML section."""


@hookspec
def rlcore_losses() -> Iterable[Component]:
    """Loss functions: subclasses of `rl_core.interfaces.policy.LossFunction`."""


@hookspec
def rlcore_datasets() -> Iterable[Component]:
    """Datasets of prompts, conversations or preferences: implementations of `rl_core.interfaces.records`."""


@hookspec
def rlcore_loggers() -> Iterable[Component]:
    """Loggers of metrics and samples: subclasses of `rl_train.metrics.logger.Logger`."""


@hookspec
def rlcore_weight_transports() -> Iterable[Component]:
    """Weight transports from a policy to an engine: subclasses of `rl_core.interfaces.policy.WeightTransport`."""


@hookspec
def rlcore_sandboxes() -> Iterable[Component]:
    """Sandboxes, which run model-written programs: subclasses of `rl_sandbox.SandboxInterface`."""


@hookspec
def rlcore_model_servers() -> Iterable[Component]:
    """Endpoints that answer agents from the training engine: subclasses of `rl_train.agents.model_server.ModelServer`."""


@hookspec
def rlcore_commands() -> Iterable[Component]:
    """Commands of `rlcore`: functions with Typer annotations, or `typer.Typer` applications, without a config.

    Called for `rlcore --help` and for a name that is not a built-in command. The target is imported when the command or its
    help is requested. Its docstring, with an `Example:`, is the help text. If the hook raises, the command does not exist.
    """


@hookspec
def rlcore_known_components() -> Iterable[KnownComponent]:
    """Components of distributions that may not be installed, as `rl_core.plugins.component.KnownComponent`.

    Those that an installed distribution provides are ignored. If a config names one of the others, the error says how to
    install its distribution; `rlcore list-backends` lists it as not installed.
    """


@hookspec
def rlcore_run_started(run: RunInfo) -> None:
    """Called once, after the run is assembled and before its first step."""


@hookspec
def rlcore_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> Control | None:
    """Called after each step, once its metrics are flushed. May return what the run should do before its next step.

    Args:
        run: The assembled run.
        step: The number of the finished step; the first is 1, and 0 is the validation before it.
        metrics: The values of the step under the names of `metrics.jsonl`.
    """


@hookspec
def rlcore_run_finished(run: RunInfo, error: BaseException | None) -> None:
    """Called once, when the run has ended, also by an error or Ctrl-C, before the workers are shut down.

    Args:
        run: The assembled run.
        error: The exception that ended the run early; None if it reached its end. If the hook raises as well, both are shown.
    """
