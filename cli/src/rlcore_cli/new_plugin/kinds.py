"""The kinds of plugins that `rlcore new-plugin` writes, and what their templates differ in."""

from __future__ import annotations

from dataclasses import dataclass

import rl_core.testing
import rl_train.testing
from rl_core.plugins.component import Kind


@dataclass(frozen=True)
class PluginKind:
    """A kind of plugin. The folder of templates with its name has the modules that only this kind has.

    Attributes:
        kind: Kind of the registered component.
        target: "module:Attribute", with `{cls}` for the class prefix: in the plugin, or in a package of rlcore (`rl_...`).
        summary: What the generated component does, in one line of at most 120 characters.
        requires: Distributions that the plugin needs in addition to rl-core.
        capabilities: Capabilities of the component.
    """

    kind: Kind
    target: str
    summary: str
    requires: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()

    @property
    def has_config(self) -> bool:
        """Whether the component has a config model, `{cls}Config` in the module `config`."""
        return self.kind not in (Kind.WEIGHT_TRANSPORT, Kind.COMMAND, Kind.SANDBOX)

    @property
    def trains(self) -> bool:
        """Whether `train.yaml` can use the component."""
        return self.kind not in (Kind.COMMAND, Kind.SANDBOX)

    @property
    def kits(self) -> dict[str, list[str]]:
        """The classes of its conformance tests, by module."""
        names = ("PackagingConformance", "".join(word.capitalize() for word in self.kind.split("_")) + "Conformance")
        modules = (rl_core.testing, rl_train.testing)
        return {module.__name__: [name for name in sorted(names) if name in module.__all__] for module in modules}


_MODEL = ("torch", "transformers")
_REFIT = ("by_reference", "shared_memory", "disk", "collective")
_POLICY, _ENGINE = ("in_process", "multiple_ranks", *_REFIT), ("in_process", "held_weight_digests", *_REFIT)
_ENVIRONMENT = "environment:{cls}Environment"
_REWARDS = "rl_train.rewards.environment:FunctionEnvironment"
_AGENT = "An agent that lets the model check its own answer, and a score of the checked answer"

PLUGIN_KINDS = {
    "environment": PluginKind(
        Kind.ENVIRONMENT, _ENVIRONMENT, "Scores whole numbers, with part of the reward for each correct digit"
    ),
    "session-environment": PluginKind(
        Kind.ENVIRONMENT, _ENVIRONMENT, "Lets the model correct a wrong answer, for a smaller reward"
    ),
    "tool-environment": PluginKind(
        Kind.ENVIRONMENT, _ENVIRONMENT, "Lets the model call a function that adds numbers before it answers"
    ),
    "agent": PluginKind(Kind.ENVIRONMENT, _ENVIRONMENT, _AGENT, ("rl-serve", "openai")),
    "reward-function": PluginKind(Kind.ENVIRONMENT, _REWARDS, "Rewards correct answers, and short ones", ("rl-train",)),
    "policy": PluginKind(
        Kind.POLICY, "policy:{cls}Policy", "Trains a Transformers model that each rank has as a whole", _MODEL, _POLICY
    ),
    "generation": PluginKind(
        Kind.GENERATION, "engine:{cls}Generation", "Samples from a Transformers model without a cache", _MODEL, _ENGINE
    ),
    "weight-transport": PluginKind(
        Kind.WEIGHT_TRANSPORT, "transport:{cls}Transport", "Sends weights through files, one at a time"
    ),
    "loss": PluginKind(Kind.LOSS, "loss:{cls}Loss", "Likelihood with adjustable length normalization", ("rl-train",)),
    "algorithm": PluginKind(Kind.ALGORITHM, "algorithm:train", "Trains on the best of N samples of each prompt", ("rl-train",)),
    "dataset": PluginKind(Kind.DATASET, "dataset:{cls}Dataset", "Generated subtraction problems"),
    "logger": PluginKind(Kind.LOGGER, "logger:{cls}Logger", "Writes chosen metrics to a CSV file", ("rl-train",)),
    "command": PluginKind(Kind.COMMAND, "command:best", "Print the step of a run with the best value of a metric", ("typer",)),
    "sandbox": PluginKind(
        Kind.SANDBOX, "sandbox:{cls}Sandbox", "The local sandbox, with a record of every program that it ran", ("rl-sandbox",)
    ),
}
"""By the value of `--kind`."""
