"""The kinds of plugins that `rlcore new-plugin` writes, and what their templates differ in."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.plugins.component import Kind


@dataclass(frozen=True, kw_only=True)
class PluginKind:
    """A kind of plugin. Templates of the kind are in the folder with its name.

    Attributes:
        kind: Kind of the registered component.
        summary: What the generated component does, in one line of at most 120 characters.
        target: "module:Attribute", with `{cls}` for the class prefix. A module of the plugin, unless it begins with "rl_".
        has_config: Whether the component has a config model, `{cls}Config` in the module `config`.
        capabilities: Capabilities of the component.
        kit: "module:Class" of its conformance tests; None if the kind has only those of every plugin.
        requires: Distributions that the plugin needs in addition to rl-core.
        trains: Whether `train.yaml` can use the component.
    """

    kind: Kind
    summary: str
    target: str
    has_config: bool = True
    capabilities: tuple[str, ...] = ()
    kit: str | None
    requires: tuple[str, ...] = ()
    trains: bool = True


_ENVIRONMENT_KIT = "rl_core.testing:EnvironmentConformance"

PLUGIN_KINDS = {
    "environment": PluginKind(
        kind=Kind.ENVIRONMENT,
        summary="Scores whole numbers, with part of the reward for each correct digit",
        target="environment:{cls}Environment",
        kit=_ENVIRONMENT_KIT,
    ),
    "session-environment": PluginKind(
        kind=Kind.ENVIRONMENT,
        summary="Lets the model correct a wrong answer, for a smaller reward",
        target="environment:{cls}Environment",
        kit=_ENVIRONMENT_KIT,
    ),
    "tool-environment": PluginKind(
        kind=Kind.ENVIRONMENT,
        summary="Lets the model call a function that adds numbers before it answers",
        target="environment:{cls}Environment",
        kit=_ENVIRONMENT_KIT,
    ),
    "agent": PluginKind(
        kind=Kind.ENVIRONMENT,
        summary="An agent that lets the model check its own answer, and a score of the checked answer",
        target="environment:{cls}Environment",
        kit=_ENVIRONMENT_KIT,
        requires=("rl-serve", "openai"),
    ),
    "reward-function": PluginKind(
        kind=Kind.ENVIRONMENT,
        summary="Rewards correct answers, and the digits of a wrong one",
        target="rl_train.rewards.environment:FunctionEnvironment",
        kit=_ENVIRONMENT_KIT,
        requires=("rl-train",),
    ),
    "loss": PluginKind(
        kind=Kind.LOSS,
        summary="Likelihood with adjustable length normalization",
        target="loss:{cls}Loss",
        kit="rl_core.testing:LossConformance",
        requires=("rl-train",),
    ),
    "algorithm": PluginKind(
        kind=Kind.ALGORITHM,
        summary="Trains on the best of N samples of each prompt",
        target="algorithm:train",
        kit=None,
        requires=("rl-train",),
    ),
    "dataset": PluginKind(
        kind=Kind.DATASET,
        summary="Generated subtraction problems",
        target="dataset:{cls}Dataset",
        kit=None,
    ),
    "logger": PluginKind(
        kind=Kind.LOGGER,
        summary="Writes chosen metrics to a CSV file",
        target="logger:{cls}Logger",
        kit=None,
        requires=("rl-train",),
    ),
    "command": PluginKind(
        kind=Kind.COMMAND,
        summary="Print the step of a run with the best value of a metric",
        target="command:best",
        has_config=False,
        kit=None,
        requires=("typer",),
        trains=False,
    ),
    "sandbox": PluginKind(
        kind=Kind.SANDBOX,
        summary="The local sandbox, with a record of every program that it ran",
        target="sandbox:{cls}Sandbox",
        has_config=False,
        kit=None,
        requires=("rl-sandbox",),
        trains=False,
    ),
}
"""By the value of `--kind`."""
