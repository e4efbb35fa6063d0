"""`rlcore new-plugin`: writes the repository of a plugin, from templates and a table of the kinds of plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined

import rl_core.testing
import rl_train.testing
from rl_core.errors import ConfigError
from rl_core.plugins.component import Kind, did_you_mean
from rl_core.plugins.hookspecs import KIND_OF_HOOK
from rl_core.plugins.manager import discover
from rlcore_cli.main import COMMANDS

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_PREFIX = "rlcore"
_MODEL = ("torch", "transformers")
_REFIT = ("by_reference", "shared_memory", "disk", "collective")
_POLICY, _ENGINE = ("in_process", "multiple_ranks", *_REFIT), ("in_process", "held_weight_digests", *_REFIT)
_ENVIRONMENT = "environment:{cls}Environment"
_REWARDS = "rl_train.rewards.environment:FunctionEnvironment"
_AGENT = "An agent that lets the model check its own answer, and a score of the checked answer"


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


def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the component: what a config will contain.", show_default=False)
    ],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(PLUGIN_KINDS)}.", show_default=False)],
) -> None:
    """Write the repository of a plugin into the new folder `rlcore-NAME`.

    It has a small working component with a config model, conformance tests, a config that trains three steps, and a CI file.

    Example:
        rlcore new-plugin long-sums --kind environment
        rlcore new-plugin acme --kind loss
    """
    if kind not in PLUGIN_KINDS:
        raise ConfigError(
            f"There is no kind {kind!r}.{did_you_mean(kind, PLUGIN_KINDS)} Choose one of {', '.join(PLUGIN_KINDS)}."
        )
    folder = write_plugin(name, kind, Path())
    print(f"Wrote {folder}. Next:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")


def write_plugin(name: str, option: str, parent: Path) -> Path:
    """Write the repository of a plugin, of a kind in `PLUGIN_KINDS`, into a new folder, and return the folder.

    Raises:
        ConfigError: The name is invalid or taken, or the folder exists.
    """
    files = plugin_files(name, option)
    folder = parent / _distribution(name)
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another name or folder. Existing files are never changed.")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def plugin_files(name: str, option: str) -> dict[str, str]:
    """The text of each file of a plugin, by its path in the repository.

    Raises:
        ConfigError: The name is invalid or taken.
    """
    kind = PLUGIN_KINDS[option]
    _check_name(name, kind)
    templates = Environment(
        loader=PackageLoader("rlcore_cli.new_plugin"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    values = _values(name, option, kind)
    files = {}
    for source in templates.list_templates():
        folder, _, path = source.removesuffix(".j2").partition("/")
        text = templates.get_template(source).render(values) if folder in ("shared", option) else ""
        if text:
            # A wheel has no files with a leading dot if a tool leaves them out, so the template has another name.
            files[path.replace("package", f"src/{values['package']}", 1).replace("github", ".github", 1)] = text
    return files


def _values(name: str, option: str, kind: PluginKind) -> dict[str, Any]:
    package = f"{_PREFIX}_{name.replace('-', '_')}"
    cls = "".join(word.capitalize() for word in re.split("[-_]", name))
    target = kind.target.format(cls=cls)
    return {
        "name": name,
        "option": option,
        "kind": kind,
        "cls": cls,
        "package": package,
        "distribution": _distribution(name),
        "hook": next(hook for hook, of in KIND_OF_HOOK.items() if of is kind.kind),
        "target": target if target.startswith("rl_") else f"{package}.{target}",
        "requires": [_requirement_of(distribution) for distribution in ("rl-core", *kind.requires)],
    }


def _requirement_of(distribution: str) -> str:
    """The requirement on one of our distributions in the version that is installed; other names as they are."""
    if not distribution.startswith("rl-"):
        return distribution
    minor = version("rl-core").rpartition(".")[0]
    return f"{distribution}~={minor}.0"


def _distribution(name: str) -> str:
    return f"{_PREFIX}-{name.replace('_', '-')}"


def _check_name(name: str, kind: PluginKind) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid plugin name: begin with a lower-case letter, and use lower-case letters and digits, "
            "with single `-` or `_` between them, such as `acme` or `long-sums`."
        )
    if name == "cli":
        raise ConfigError(f"The package of a plugin {name!r} would replace {_PREFIX}_{name}: choose another name.")
    if kind.kind is Kind.COMMAND and name in COMMANDS:
        raise ConfigError(f"`rlcore` has a command {name!r}, which a plugin cannot replace: choose another name.")
    for registration in discover().registrations:
        if registration.kind == kind.kind and registration.component.name == name:
            raise ConfigError(
                f"{registration.plugin.label} registers the {kind.kind.label} {name!r}, and a config that uses a name twice is "
                "rejected: choose another name."
            )
