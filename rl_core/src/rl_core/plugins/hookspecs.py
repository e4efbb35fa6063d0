"""The hooks that a plugin may implement: the purpose of each, and when and where it is called. This module calls none of them.

Noun hooks return components and are called once, at discovery, in the process that runs the command; nothing else of
their distribution is imported then. Event hooks report the progress of a run and are called in its driver process, never in
a worker. A hook may declare fewer arguments than its specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from rl_core.plugins.component import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_core.plugins.component import Component, KnownComponent
    from rl_core.plugins.run_info import RunInfo

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
    "rlcore_commands": Kind.COMMAND,
}
"""Maps each noun hook to the kind of the components that it returns."""
KNOWN_COMPONENTS_HOOK = "rlcore_known_components"
EVENT_HOOKS = ("rlcore_run_started", "rlcore_step_finished", "rlcore_run_finished")


@hookspec
def rlcore_policies() -> Iterable[Component]:
    """Policy backends of a distribution: they train a model.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.policy.PolicyInterface`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
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
    """
    raise NotImplementedError


@hookspec
def rlcore_generations() -> Iterable[Component]:
    """Generation backends of a distribution: they sample completions.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.generation.GenerationInterface`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_generations() -> list[Component]:
        ...     return [
        ...         Component(
        ...             "acme",
        ...             target="rl_backends_acme.generation:AcmeGeneration",
        ...             config="rl_backends_acme.config:AcmeGenerationConfig",
        ...             summary="Acme's engine",
        ...             capabilities=("generate_async",),
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_environments() -> Iterable[Component]:
    """Environments of a distribution: they respond to rollouts and score them.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.environment.EnvironmentInterface`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_environments() -> list[Component]:
        ...     return [
        ...         Component(
        ...             "chess",
        ...             target="rl_envs_chess.environment:ChessEnvironment",
        ...             config="rl_envs_chess.config:ChessConfig",
        ...             summary="Chess against an engine",
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_algorithms() -> Iterable[Component]:
    """Algorithms of a distribution: functions that train a run to its end.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are functions `train(config, run)`; the component name is the name of
        the YAML section.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_algorithms() -> list[Component]:
        ...     return [
        ...         Component(
        ...             "best-of-n",
        ...             target="rl_acme.best_of_n:train",
        ...             config="rl_acme.config:BestOfNConfig",
        ...             summary="Trains on the best of N samples",
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_losses() -> Iterable[Component]:
    """Loss functions of a distribution.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.loss.LossFunction`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_losses() -> list[Component]:
        ...     return [
        ...         Component(
        ...             "huber",
        ...             target="rl_acme.losses:HuberLossFn",
        ...             config="rl_acme.config:HuberLossConfig",
        ...             summary="Policy gradient with a Huber penalty",
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_datasets() -> Iterable[Component]:
    """Datasets of a distribution: sources of prompts, conversations or preferences.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets implement `rl_core.interfaces.dataset`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_datasets() -> list[Component]:
        ...     return [
        ...         Component(
        ...             "riddles",
        ...             target="rl_acme.riddles:RiddleDataset",
        ...             config="rl_acme.config:RiddleConfig",
        ...             summary="Ten thousand riddles with answers",
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_loggers() -> Iterable[Component]:
    """Loggers of a distribution: destinations of metrics and samples.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets implement `rl_core.interfaces.logger`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_loggers() -> list[Component]:
        ...     return [Component("sqlite", target="rl_acme.sqlite:SqliteLogger", summary="Metrics in one SQLite file")]
    """
    raise NotImplementedError


@hookspec
def rlcore_weight_transports() -> Iterable[Component]:
    """Weight transports of a distribution: they send a policy's weights to a generation backend.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets implement `rl_core.interfaces.weights`.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; using its components is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_weight_transports() -> list[Component]:
        ...     return [
        ...         Component("rdma", target="rl_acme.rdma:RdmaTransport", summary="One-sided RDMA writes")
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_commands() -> Iterable[Component]:
    """Commands that a distribution adds to `rlcore`.

    When: once, at discovery, in the process of the `rlcore` command, for `rlcore --help` and for a name that is not
        a built-in command. The target is imported when the command or its help is requested.
    Return: components whose targets are functions with Typer annotations, or `typer.Typer` applications; the docstring,
        with an `Example:`, is the command's help. Commands have no config.
    When it raises: the plugin gets the status `failed`; other plugins are not affected; the command does not exist.

    Example:
        >>> @hookimpl
        ... def rlcore_commands() -> list[Component]:
        ...     return [Component("play", target="rl_envs_chess.play:play", summary="Play a game against a checkpoint")]
    """
    raise NotImplementedError


@hookspec
def rlcore_known_components() -> Iterable[KnownComponent]:
    """Components of distributions that may not be installed.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: the components; those that an installed distribution provides are ignored. If a config names one of the others, the
        error says how to install its distribution; `rlcore list-backends` lists it as not installed.
    When it raises: the plugin gets the status `failed`; other plugins are not affected.

    Example:
        >>> @hookimpl
        ... def rlcore_known_components() -> list[KnownComponent]:
        ...     return [
        ...         KnownComponent(
        ...             kind=Kind.GENERATION,
        ...             name="acme",
        ...             distribution="rl-backends-acme",
        ...             install="pip install rl-backends-acme",
        ...         )
        ...     ]
    """
    raise NotImplementedError


@hookspec
def rlcore_run_started(run: RunInfo) -> None:
    """Called when a run is assembled.

    When: once, after assembly and before the first step, in the driver process.
    Return: nothing.
    When it raises: the hooks of other plugins are still called, then the run stops with an error that names the plugin and its
        distribution.

    Args:
        run: The assembled run.

    Example:
        >>> @hookimpl
        ... def rlcore_run_started(run: RunInfo) -> None:
        ...     print("run started")
    """


@hookspec
def rlcore_step_finished(run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
    """Called when a step is finished and its metrics are written.

    When: after each step, once its metrics are flushed, in the driver process; the next step waits for it.
    Return: nothing.
    When it raises: the hooks of other plugins are still called, then the run stops with an error that names the plugin and its
        distribution.

    Args:
        run: The assembled run.
        step: The number of the finished step; the first is 1, and 0 is the validation before it.
        metrics: The values of the step under the names of `metrics.jsonl`.

    Example:
        >>> @hookimpl
        ... def rlcore_step_finished(step: int, metrics: Mapping[str, float]) -> None:
        ...     print(step, metrics["reward/mean"])
    """


@hookspec
def rlcore_run_finished(run: RunInfo, error: BaseException | None) -> None:
    """Called when a run is over, however it ended.

    When: once, at the end, also after an error or Ctrl-C, before the workers are shut down, in the driver process.
    Return: nothing.
    When it raises: the hooks of other plugins are still called, then the command fails with an error that names the plugin and
        its distribution; an error of the run itself is shown above it.

    Args:
        run: The assembled run.
        error: The exception that ended the run early; None if it reached its end.

    Example:
        >>> @hookimpl
        ... def rlcore_run_finished(error: BaseException | None) -> None:
        ...     print("done" if error is None else f"stopped: {error}")
    """
