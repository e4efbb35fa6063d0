"""The hooks that a plugin may implement: what each is for, when it is called, where. It calls none of them.

Noun hooks describe components and are called once, at discovery, in the process that runs the command; nothing else of
their distribution is imported then. Event hooks tell of a run and are called in its driver process, never in a worker. A
hook may name fewer arguments than its specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from rl_core.plugins.component import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_core.plugins.component import Component
    from rl_core.run import Run

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
"""Every noun hook and the kind of the components that it returns."""


@hookspec
def rlcore_policies() -> Iterable[Component]:
    """The policy backends of a distribution: what trains a model.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.policy.PolicyInterface`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The generation backends of a distribution: what samples completions.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.generation.GenerationInterface`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The environments of a distribution: what answers and scores.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.environment.EnvironmentInterface`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The algorithms of a distribution: each a function that trains a run to its end.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are functions `train(config, run)`; the name is that of the YAML section.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The loss functions of a distribution.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets are subclasses of `rl_core.interfaces.loss.LossFunction`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The datasets of a distribution: what prompts, conversations or preferences come from.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets follow `rl_core.interfaces.dataset`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The loggers of a distribution: where metrics and samples go.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets follow `rl_core.interfaces.logger`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

    Example:
        >>> @hookimpl
        ... def rlcore_loggers() -> list[Component]:
        ...     return [Component("sqlite", target="rl_acme.sqlite:SqliteLogger", summary="Metrics in one SQLite file")]
    """
    raise NotImplementedError


@hookspec
def rlcore_weight_transports() -> Iterable[Component]:
    """The ways in which a distribution brings a policy's weights to a generation backend.

    When: once, at discovery, in the process of the `rlcore` command.
    Return: components whose targets follow `rl_core.interfaces.weights`.
    When it raises: the plugin is `failed` for that reason; others are untouched; naming its component is an error.

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
    """The commands that a distribution adds to `rlcore`.

    When: once, at discovery, in the process of the `rlcore` command, for `rlcore --help` and for a name that is no
        command of `rlcore` itself. The target is imported when the command is run, or asked for its own help.
    Return: components whose targets are functions with Typer's annotations, or `typer.Typer` applications; a docstring
        with an `Example:` is its help. No config.
    When it raises: the plugin is `failed` for that reason; others are untouched; the command does not exist.

    Example:
        >>> @hookimpl
        ... def rlcore_commands() -> list[Component]:
        ...     return [Component("play", target="rl_envs_chess.play:play", summary="Play a game against a checkpoint")]
    """
    raise NotImplementedError


@hookspec
def rlcore_run_started(run: Run) -> None:
    """Tells that a run is assembled.

    When: once, after assembly and before the first step, in the driver process.
    Return: nothing.
    When it raises: the other plugins are told, then the run stops with an error that names the plugin and its
        distribution.

    Args:
        run: The assembled parts of the run; read them, do not change them.

    Example:
        >>> @hookimpl
        ... def rlcore_run_started(run: Run) -> None:
        ...     print("a run begins")
    """


@hookspec
def rlcore_step_finished(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Tells that a step is over and its metrics are written.

    When: after each step, once its metrics are flushed, in the driver process; the next step waits for it.
    Return: nothing.
    When it raises: the other plugins are told, then the run stops with an error that names the plugin and its
        distribution.

    Args:
        run: The assembled parts of the run.
        step: The number of the finished step; the first is 1, and 0 is a validation before it.
        metrics: The values of the step under the names of `metrics.jsonl`.

    Example:
        >>> @hookimpl
        ... def rlcore_step_finished(step: int, metrics: Mapping[str, float]) -> None:
        ...     print(step, metrics["reward/mean"])
    """


@hookspec
def rlcore_run_finished(run: Run, error: BaseException | None) -> None:
    """Tells that a run is over, however it ended.

    When: once, at the end, also after an error or Ctrl-C, before the workers are shut down, in the driver process.
    Return: nothing.
    When it raises: the other plugins are told, then the command fails with an error that names the plugin and its
        distribution; an error of the run itself is shown above it.

    Args:
        run: The assembled parts of the run.
        error: What ended the run early; None where it reached its end.

    Example:
        >>> @hookimpl
        ... def rlcore_run_finished(error: BaseException | None) -> None:
        ...     print("done" if error is None else f"stopped: {error}")
    """
