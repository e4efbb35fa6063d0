"""`rlcore new-plugin`: writes the repository of a plugin, from templates and a table of the kinds of plugins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
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
_FORM = "begin with a lower-case letter, and use lower-case letters and digits, with single `-` or `_` between them"
_PREFIX = "rlcore"
_MODEL = ("rl-backends-base", "torch", "transformers")
_REFIT = ("by_reference", "shared_memory", "disk", "collective")
_POLICY = ("in_process", "multiple_ranks", "dynamic_batching", "topk_logprobs", "scores_sampled_sets", *_REFIT)
_SAMPLING = ("top_p", "top_k", "sampled_sets", "top_logprobs")
_ENGINE = ("in_process", *_SAMPLING, "async_rows", "refit_in_flight", "held_weight_digests", *_REFIT)
_ENVIRONMENT = "environment:{cls}Environment"
_REWARDS = "rl_train.rewards.environment:FunctionEnvironment"
_SAMPLES = (Kind.ENVIRONMENT, Kind.GENERATION, Kind.ALGORITHM, Kind.WEIGHT_TRANSPORT)
_LONGEST = 120
_AGENT = "An agent that lets the model check its own answer, and a score of the checked answer"


@dataclass(frozen=True)
class PluginKind:
    """A kind of plugin. The folder of templates with its name has the modules that only this kind has.

    Policies and engines share those in the folder `backend`.

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
    def is_backend(self) -> bool:
        """Whether it has workers."""
        return self.kind in (Kind.POLICY, Kind.GENERATION)

    @property
    def config(self) -> str | None:
        """The name of its config model in the module `config`, without the class prefix; None if it has none."""
        if self.kind in (Kind.WEIGHT_TRANSPORT, Kind.COMMAND, Kind.SANDBOX):
            return None
        return f"{self.kind.capitalize()}Config" if self.is_backend else "Config"

    @property
    def trains(self) -> bool:
        """Whether `train.yaml` can use the component."""
        return self.kind not in (Kind.COMMAND, Kind.SANDBOX)

    @property
    def kit(self) -> str:
        """The class of its conformance tests."""
        return "".join(word.capitalize() for word in self.kind.split("_")) + "Conformance"

    @property
    def hook(self) -> str:
        """The hook that registers it."""
        return next(hook for hook, kind in KIND_OF_HOOK.items() if kind is self.kind)


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
        Kind.GENERATION, "engine:{cls}Generation", "Samples from a Transformers model, row by row", _MODEL, _ENGINE
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
    kind: Annotated[
        list[str],
        typer.Option(help=f"One of {', '.join(PLUGIN_KINDS)}. May be given several times, for one plugin.", show_default=False),
    ],
    distribution: Annotated[
        str | None,
        typer.Option(help="Name of the distribution and of its folder, such as rl-backends-NAME; rlcore-NAME by default."),
    ] = None,
) -> None:
    """Write the repository of a plugin into a new folder with the name of its distribution.

    It has a small working component with a config model, conformance tests, a config that trains three steps, and a CI file.

    Example:
        rlcore new-plugin long-sums --kind environment
        rlcore new-plugin acme --kind loss
        rlcore new-plugin acme --kind dataset --kind environment
        rlcore new-plugin acme --kind policy --kind generation --distribution rl-backends-acme
    """
    folder = write_plugin(name, kind, Path(), distribution=distribution)
    print(f"Wrote {folder}. Next:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")


def write_plugin(name: str, options: Sequence[str], parent: Path, *, distribution: str | None = None) -> Path:
    """Write the repository of a plugin, of kinds in `PLUGIN_KINDS`, into a new folder, and return the folder.

    Raises:
        ConfigError: The name is invalid or taken, the kinds cannot be in one plugin, or the folder exists.
    """
    files = plugin_files(name, *options, distribution=distribution)
    folder = parent / (distribution or _distribution(name))
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another name or folder. Existing files are never changed.")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def plugin_files(name: str, *options: str, distribution: str | None = None) -> dict[str, str]:
    """The text of each file of a plugin, by its path in the repository.

    Raises:
        ConfigError: The name is invalid or taken, or the kinds cannot be in one plugin.
    """
    kinds = _kinds(options)
    _check_name(name, kinds.values())
    values = _values(name, kinds, _checked(distribution or _distribution(name)))
    templates = Environment(
        loader=PackageLoader("rlcore_cli.new_plugin"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    modules, files = _config_modules(kinds), {}
    for source in templates.list_templates():
        folder, _, path = source.removesuffix(".j2").partition("/")
        if folder not in ("shared", *modules):
            continue
        if text := templates.get_template(source).render(values, modules=modules, module=modules.get(folder)):
            # A wheel has no files with a leading dot if a tool leaves them out, so the template has another name.
            path = path.replace("package", f"src/{values['package']}", 1).replace("github", ".github", 1)
            files[path.replace("config.py", f"{modules.get(folder)}.py")] = text
    return files


def _config_modules(kinds: Mapping[str, PluginKind]) -> dict[str, str]:
    """The module of the config model, by folder of templates: `config`, or one for each component that has no worker."""
    shared = {"backend": "config"} if any(kind.is_backend for kind in kinds.values()) else {}
    several = len({*shared, *(option for option, kind in kinds.items() if not kind.is_backend)}) > 1
    own = {option: f"{kind.kind}_config" if several and not kind.is_backend else "config" for option, kind in kinds.items()}
    return shared | own


def _kinds(options: Sequence[str]) -> dict[str, PluginKind]:
    """The kinds of a plugin, by the value of `--kind`."""
    for option in options:
        if option not in PLUGIN_KINDS:
            raise ConfigError(
                f"There is no kind {option!r}.{did_you_mean(option, PLUGIN_KINDS)} Choose one of {', '.join(PLUGIN_KINDS)}."
            )
    kinds = {option: kind for option, kind in PLUGIN_KINDS.items() if option in options}
    same = [option for option, kind in kinds.items() if [each.kind for each in kinds.values()].count(kind.kind) > 1]
    if same:
        raise ConfigError(
            f"`--kind {same[0]}` and `--kind {same[1]}` cannot be combined: both register the {kinds[same[0]].kind.label} of "
            "that name. Write one plugin for each."
        )
    return kinds


def _values(name: str, kinds: Mapping[str, PluginKind], distribution: str) -> dict[str, Any]:
    package = distribution.replace("-", "_")
    cls = "".join(word.capitalize() for word in re.split("[-_]", name))
    first, *others = (kind.summary for kind in kinds.values())
    summary = "; ".join([first, *(each[0].lower() + each[1:] for each in others)])
    *earlier, last = (kind.kind.label for kind in kinds.values())
    labels = f"{', '.join(earlier)} and {last}" if earlier else last
    requires = dict.fromkeys(["rl-core", *(each for kind in kinds.values() for each in kind.requires)])
    kits = {"PackagingConformance", *(kind.kit for kind in kinds.values())}
    targets = {option: kind.target.format(cls=cls) for option, kind in kinds.items()}
    return {
        "name": name,
        "options": list(kinds),
        "kinds": kinds,
        "trains": any(kind.trains for kind in kinds.values()),
        "backend": any(kind.is_backend for kind in kinds.values()),
        "environment": any(kind.kind is Kind.ENVIRONMENT for kind in kinds.values()),
        "samples": "loss" not in kinds or any(kind.kind in _SAMPLES for kind in kinds.values()),
        "cls": cls,
        "package": package,
        "distribution": distribution,
        "labels": labels,
        "summary": summary if len(summary) <= _LONGEST else f"{labels} `{name}`".capitalize(),
        "targets": {option: each if each.startswith("rl_") else f"{package}.{each}" for option, each in targets.items()},
        "requires": [_requirement_of(each) for each in requires],
        "kits": {module.__name__: sorted(kits & {*module.__all__}) for module in (rl_core.testing, rl_train.testing)},
    }


def _requirement_of(distribution: str) -> str:
    """The requirement on one of our distributions in the version that is installed; other names as they are."""
    if not distribution.startswith("rl-"):
        return distribution
    minor = version("rl-core").rpartition(".")[0]
    return f"{distribution}~={minor}.0"


def _distribution(name: str) -> str:
    return f"{_PREFIX}-{name.replace('_', '-')}"


def _checked(distribution: str) -> str:
    """A name of a distribution that is valid and not taken."""
    if not _NAME.fullmatch(distribution):
        raise ConfigError(f"{distribution!r} is not a valid name of a distribution: {_FORM}, such as `rl-backends-acme`.")
    package = distribution.replace("-", "_")
    if PathFinder.find_spec(package) is not None:
        raise ConfigError(f"The package of {distribution!r} would replace {package}, which is installed: choose another name.")
    return distribution


def _check_name(name: str, kinds: Iterable[PluginKind]) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid plugin name: {_FORM}, such as `acme` or `long-sums`.")
    for kind in kinds:
        if kind.kind is Kind.COMMAND and name in COMMANDS:
            raise ConfigError(f"`rlcore` has a command {name!r}, which a plugin cannot replace: choose another name.")
        for registration in discover().registrations:
            if registration.kind == kind.kind and registration.component.name == name:
                raise ConfigError(
                    f"{registration.plugin.label} registers the {kind.kind.label} {name!r}, and a config that uses a name "
                    "twice is rejected: choose another name."
                )
