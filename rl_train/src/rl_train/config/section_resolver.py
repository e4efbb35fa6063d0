"""Finds the model of each section: a built-in model, or the model of the component that the section names.

Values are not validated here. Components are looked up in the registry, and names that are unknown, not installed or broken are
reported at their lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_core.config import schema as core_schema
from rl_core.config.diagnostics import Problems, show
from rl_core.config.introspection import NO_DEFAULT, Field, Model, all_fields, find_field
from rl_core.config.source_tree import KeyPath, Node
from rl_core.errors import InvalidComponentError, PluginError
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.registry import Registry
from rl_train.config import schema
from rl_train.config.algorithm import AlgorithmPathConfig, choose_algorithm
from rl_train.config.aliases import MEANINGS

FUNCTIONS = "function"
"""The environment whose rewards are plain functions."""
FUNCTION_KEYS = ("reward_fn", "reward_fns")
"""Keys of `env.<task>` that choose that environment."""

AGENT = "agent"
"""The environment of a task whose agent returns the reward, and the key of `env.<task>` that chooses it."""

SECTIONS: dict[str, Model | None] = {
    "algorithm": AlgorithmPathConfig,
    "loss_fn": None,
    "policy": None,
    "value": None,
    "teacher": None,
    "data": schema.DataConfig,
    "env": None,
    "cluster": core_schema.ClusterConfig,
    "rollout": schema.RolloutConfig,
    "profiling": schema.ProfilingConfig,
    "checkpointing": schema.CheckpointingConfig,
    "logger": schema.LoggingConfig,
}
"""Sections that every config may have in addition to its algorithm's; None if the model comes from a component."""

OPTIONAL = ("algorithm",)
"""Built-in sections with required keys, which are only created if the config has them."""

COMPANIONS: dict[str, dict[str, Any]] = {
    "value": {"head": "scalar", "frozen": False},
    "teacher": {"head": "tokens", "frozen": True},
}
"""Sections of additional models, with the keys of `policy`, and the values that each implies."""

BASES: dict[Kind, tuple[Model, Model]] = {
    Kind.ALGORITHM: (schema.AlgorithmConfig, schema.AlgorithmConfig),
    Kind.LOSS: (schema.LossConfig, schema.OpenLossConfig),
    Kind.POLICY: (core_schema.PolicyConfig, schema.OpenPolicyConfig),
    Kind.GENERATION: (core_schema.GenerationConfig, schema.OpenGenerationConfig),
    Kind.ENVIRONMENT: (core_schema.EnvironmentConfig, schema.OpenEnvironmentConfig),
    Kind.DATASET: (core_schema.DatasetConfig, schema.OpenDatasetConfig),
    Kind.LOGGER: (schema.LoggerConfig, schema.OpenLoggerConfig),
}
"""The base class of the config model of each kind, and the model of a component given by its path."""


@dataclass(frozen=True, kw_only=True)
class SectionSchema:
    """A section, its model, and the component that it belongs to.

    Attributes:
        path: The section's key.
        model: Its model.
        component: None for the built-in sections.
        kind: The kind of the component.
        implied: Values of keys that follow from the position of the section in the config.
    """

    path: KeyPath
    model: Model
    component: Component | None = None
    kind: Kind | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether the section accepts keys that its model does not define."""
        return self.model.model_config.get("extra") == "allow"


@dataclass(frozen=True, kw_only=True)
class ConfigLayout:
    """The sections of a config, and the keys that they may have.

    Attributes:
        parts: By section key.
        algorithm: Name of the algorithm; None if it could not be determined.
        slots: Keys of all sections that belong to components, found or not.
    """

    parts: dict[KeyPath, SectionSchema]
    algorithm: str | None
    slots: frozenset[KeyPath]

    def find(self, path: KeyPath) -> Field | None:
        """The field at a key, or None if no section has such a key."""
        part = self.enclosing_section(path)
        return None if part is None else find_field(part.model, path[len(part.path) :], prefix=part.path)

    def enclosing_section(self, path: KeyPath) -> SectionSchema | None:
        """The innermost section that contains a key."""
        return next((self.parts[path[:n]] for n in range(len(path) - 1, 0, -1) if path[:n] in self.parts), None)

    def takes_any(self, path: KeyPath) -> bool:
        """Whether a section accepts this key without defining it."""
        if path[:-1] in (("env",), ("data", "mix"), ("logger", "loggers")):
            return True
        found, part = self.find(path), self.enclosing_section(path)
        if found is None:
            return part is not None and part.is_open and part.component is not None
        return found.is_free and found.default is NO_DEFAULT

    def default(self, path: KeyPath) -> Any:
        """The value of a key that the file does not set; `NO_DEFAULT` if it is required or there is no such key."""
        part = self.parts.get(path[:-1])
        if part is not None and path[-1] in part.implied:
            return part.implied[str(path[-1])]
        found = self.find(path)
        return NO_DEFAULT if found is None else found.default

    def fields(self) -> list[Field]:
        """Every field of every section."""
        return [found for part in self.parts.values() for found in all_fields(part.model, prefix=part.path)]

    def ending_in(self, name: str) -> list[KeyPath]:
        """All full keys that end in this name or else in our name for it, including default keys of free mappings."""
        found = []
        for item in self.fields():
            if item.name.casefold() == name.casefold():
                found.append(item.path)
            elif isinstance(item.default, dict) and name in item.default and item.model is None:
                found.append((*item.path, name))
        return list(dict.fromkeys(found)) or (self.ending_in(MEANINGS[name]) if name in MEANINGS else [])


def resolve_sections(values: Mapping[str, Any], *, written: Node, registry: Registry, problems: Problems) -> ConfigLayout:
    """The model of each section that the values contain or need.

    Args:
        values: The plain values of the whole config.
        written: The same values with their source locations.
        registry: Used to look up components.
        problems: Receives names that cannot be found, and invalid sections.
    """
    resolver = _SectionResolver(values, written=written, registry=registry, problems=problems)
    algorithm = resolver.algorithm()
    resolver.loss()
    resolver.policy()
    resolver.companions()
    resolver.data()
    resolver.environments()
    for name in ("cluster", "rollout", "profiling", "checkpointing", "logger"):
        resolver.own(name)
    resolver.loggers()
    return ConfigLayout(parts=resolver.parts, algorithm=algorithm, slots=frozenset(resolver.slots))


class _SectionResolver:
    """Fills `parts` in one pass over the sections."""

    def __init__(self, values: Mapping[str, Any], *, written: Node, registry: Registry, problems: Problems) -> None:
        self.parts: dict[KeyPath, SectionSchema] = {}
        self.slots: set[KeyPath] = set()
        self._values = values
        self._written = written
        self._registry = registry
        self._problems = problems
        self._default_loss: str | None = None
        self._has_algorithm = False
        self._head: str = "tokens"

    def algorithm(self) -> str | None:
        """The section of the algorithm."""
        self.own("algorithm")
        component = choose_algorithm(
            self._values, sections=SECTIONS, written=self._written, registry=self._registry, problems=self._problems
        )
        if component is None:
            return None
        self._section((component.name,))
        self._add((component.name,), Kind.ALGORITHM, component)
        part = self.parts.get((component.name,))
        if part is not None and issubclass(part.model, schema.AlgorithmConfig):
            self._has_algorithm = True
            self._default_loss, self._head = part.model.default_loss, part.model.head
        return component.name

    def loss(self) -> None:
        """`loss_fn`: the loss that it names, or the default of the algorithm."""
        section = self._section(("loss_fn",))
        if section is None:
            return
        self._begin(("loss_fn",), Kind.LOSS)
        name = section.get("name")
        implied = {}
        if name is None:
            name = self._default_loss
            implied = {"name": name}
        if name is not None:
            self._named(("loss_fn",), Kind.LOSS, name, key="name", implied=implied)
        elif self._has_algorithm:
            self._problems.mark_invalid(
                "is required: the algorithm's model has no `default_loss`.",
                location=self._written.nearest(("loss_fn",)).key_location,
                path=("loss_fn", "name"),
            )

    def policy(self) -> None:
        """`policy` and `policy.generation`, each by its backend."""
        section = self._section(("policy",))
        if section is None:
            return
        self._by_key(("policy",), section, Kind.POLICY, key="backend", implied={"head": self._head})
        if section.get("generation") is not None:
            generation = self._section(("policy", "generation"))
            if generation is not None:
                self._by_key(("policy", "generation"), generation, Kind.GENERATION, key="backend")

    def companions(self) -> None:
        """The models in addition to the policy, each by its backend."""
        for name, implied in COMPANIONS.items():
            section = self._section((name,))
            if section is not None and self._values.get(name) is not None:
                self._by_key((name,), section, Kind.POLICY, key="backend", implied=implied)

    def data(self) -> None:
        """`data` and its datasets, each by its name."""
        section = self._section(("data",))
        if section is None:
            return
        self.parts["data",] = SectionSchema(path=("data",), model=schema.DataConfig)
        for split in ("train", "validation"):
            if section.get(split) is None:
                continue
            dataset = self._section(("data", split))
            if dataset is not None:
                self._by_key(("data", split), dataset, Kind.DATASET, key="dataset_name")
        for group in ("mix", "validation_sets"):
            for name in self._section(("data", group)) or ():
                member = self._section(("data", group, name))
                if member is not None:
                    self._by_key(("data", group, name), member, Kind.DATASET, key="dataset_name")

    def environments(self) -> None:
        """`env.<task>`: by path, by name, by its reward functions or its agent, or by the task's own name."""
        for task in self._section(("env",)) or ():
            path = ("env", task)
            section = self._section(path)
            if section is None:
                continue
            env_cls, name = section.get("env_cls"), section.get("name")
            if env_cls is not None:
                self._named(path, Kind.ENVIRONMENT, env_cls, key="env_cls", must_be_path=True)
            elif name is not None:
                self._named(path, Kind.ENVIRONMENT, name, key="name")
            elif section.keys() & set(FUNCTION_KEYS):
                self._named(path, Kind.ENVIRONMENT, FUNCTIONS, key=None, implied={"name": FUNCTIONS})
            elif AGENT in section:
                self._named(path, Kind.ENVIRONMENT, AGENT, key=None, implied={"name": AGENT})
            else:
                self._named(path, Kind.ENVIRONMENT, task, key=None, implied={"name": task})

    def loggers(self) -> None:
        """`logger.loggers.<name>`."""
        if self._section(("logger",)) is None:
            return
        for name in self._section(("logger", "loggers")) or ():
            path = ("logger", "loggers", name)
            if self._section(path) is not None:
                self._named(path, Kind.LOGGER, name, key=None)

    def own(self, name: str) -> None:
        """A built-in section."""
        model = SECTIONS[name]
        is_there = name not in OPTIONAL or self._values.get(name) is not None
        if model is not None and is_there and self._section((name,)) is not None:
            self.parts[name,] = SectionSchema(path=(name,), model=model)

    def _section(self, path: KeyPath) -> Mapping[str, Any] | None:
        """The values of a section: empty if it is missing or null, None if it is not a mapping, which is reported."""
        section: Mapping[str, Any] = self._values
        for depth, part in enumerate(path, start=1):
            value = section.get(str(part))
            if self._problems.is_invalid(path[:depth]):
                return None
            if value is None:
                return {}
            if not isinstance(value, Mapping):
                self._problems.mark_invalid(
                    f"must be a section with keys below it; found {show(value)}.",
                    location=self._written.nearest(path[:depth]).location,
                    path=path[:depth],
                )
                return None
            section = value
        return section

    def _by_key(
        self,
        path: KeyPath,
        section: Mapping[str, Any],
        kind: Kind,
        *,
        key: str,
        implied: Mapping[str, Any] | None = None,
    ) -> None:
        self._begin(path, kind)
        if section.get(key) is None:
            here = (*path, key)
            if not self._problems.is_invalid(here):
                installed = ", ".join(self._registry.names(kind)) or "none"
                self._problems.mark_invalid(
                    f"is required: choose a {kind.label}. Installed: {installed}.",
                    location=self._written.nearest(path).key_location,
                    path=here,
                )
            return
        self._named(path, kind, section[key], key=key, implied=implied)

    def _named(
        self,
        path: KeyPath,
        kind: Kind,
        name: Any,
        *,
        key: str | None,
        implied: Mapping[str, Any] | None = None,
        must_be_path: bool = False,
    ) -> None:
        self._begin(path, kind)
        where = path if key is None else (*path, key)
        # An implied name has no location, so problems are reported at the section.
        written = self._written.nearest(where)
        location = written.key_location if key is None else written.location
        if not isinstance(name, str):
            self._problems.mark_invalid(
                f"must be the name of a {kind.label}; found {show(name)}.", location=location, path=where
            )
            return
        if must_be_path and not is_path(name):
            self._problems.add(
                f"must be the dotted path of a class, package.module.Class; found {name!r}. For a registered environment, use "
                "`name`.",
                location=location,
                path=where,
            )
            return
        try:
            component = self._registry.find(kind, name)
        except PluginError as error:
            hint = ""
            if kind is Kind.ENVIRONMENT and key is None:
                hint = " (A task may have any name: set `name:` or `env_cls:` to choose its environment.)"
            self._problems.add(f"{error}{hint}", location=location, path=where)
            return
        self._add(path, kind, component, implied=implied)

    def _begin(self, path: KeyPath, kind: Kind) -> None:
        """Registers a section with its base model, so that common keys are checked even if its component is not found."""
        self.slots.add(path)
        self.parts.setdefault(path, SectionSchema(path=path, model=BASES[kind][1], kind=kind))

    def _add(self, path: KeyPath, kind: Kind, component: Component, *, implied: Mapping[str, Any] | None = None) -> None:
        try:
            model = section_of(component, kind)
        except PluginError as error:
            self._problems.add(str(error), location=self._written.nearest(path).key_location, path=path)
            return
        self.parts[path] = SectionSchema(path=path, model=model, component=component, kind=kind, implied=implied or {})


def section_of(component: Component, kind: Kind) -> Model:
    """The model of a component's section.

    Raises:
        PluginError: The model cannot be imported, or does not extend the base model of its kind.
    """
    base, opened = BASES[kind]
    model = component.load_config()
    if model is None:
        return opened if is_path(component.name) else base
    if not issubclass(model, base):
        raise InvalidComponentError(
            f"The config model {component.config} of the {kind.label} {component.name!r} is not a subclass of "
            f"{base.__module__}.{base.__name__}. This is a bug in the package that registers it."
        )
    return model
