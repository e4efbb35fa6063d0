"""Finds the algorithm of a config, and the model of each section: a built-in one, or that of the component that it names.

Values are not validated here. Components are looked up in the registry, and names that are unknown, not installed or broken are
reported at their lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rl_core.config.diagnostics import KeyPath, Node, Problems, dotted, show
from rl_core.config.introspection import Model
from rl_core.config.schema import ClusterConfig
from rl_core.errors import PluginError, UnknownComponentError
from rl_core.plugins.component import Component, Kind, is_path, nearest
from rl_core.plugins.registry import Registry
from rl_train.config import schema
from rl_train.config.algorithm import AlgorithmPathConfig
from rl_train.config.foreign_names import INSTEAD, MEANINGS
from rl_train.config.schema import BASES, model_at, section_of
from rl_train.config.slots import ANY, SLOTS, WITH_NAMES, ConfigLayout, SectionSchema, Slot

BUILT_IN: dict[str, Model] = {
    "algorithm": AlgorithmPathConfig,
    "data": schema.DataConfig,
    "cluster": ClusterConfig,
    "rollout": schema.RolloutConfig,
    "profiling": schema.ProfilingConfig,
    "checkpointing": schema.CheckpointingConfig,
    "logger": schema.LoggingConfig,
    "stop": schema.StopConfig,
}
"""The sections of the runtime, whose models do not depend on a component."""
BUILT_IN_WITH_NAMES: dict[str, Model] = dict.fromkeys(WITH_NAMES, schema.CallbackConfig)
"""Sections of the runtime that hold sections with names that the user chooses, and the models of these."""

SECTIONS = tuple(name for name in schema.RunConfig.model_fields if name != "algorithm_name")
"""Sections that every config may have in addition to its algorithm's."""
_PATHS = tuple(AlgorithmPathConfig.model_fields)


def resolve_sections(values: Mapping[str, Any], *, written: Node, registry: Registry, problems: Problems) -> ConfigLayout:
    """The model of each section that the values contain or need.

    Args:
        values: The plain values of the whole config.
        written: The same values with their source locations.
        registry: Used to look up components.
        problems: Receives names that cannot be found, and invalid sections.
    """
    resolver = _SectionResolver(values, written=written, registry=registry, problems=problems)
    algorithm = resolver.resolve_algorithm()
    for name in SECTIONS:
        resolver.resolve_built_in(name)
        resolver.resolve_with_names(name)
        for slot in SLOTS:
            if slot.path[0] == name:
                resolver.resolve_slot(slot)
    layout = ConfigLayout(sections=resolver.sections, algorithm=algorithm)
    for name in resolver.unknown:
        resolver.report_unknown_section(name, layout.ending_in(name))
    return layout


class _SectionResolver:
    """Fills `sections` and `unknown`, the names of unknown sections, in one pass over the values."""

    def __init__(self, values: Mapping[str, Any], *, written: Node, registry: Registry, problems: Problems) -> None:
        self.sections: dict[KeyPath, SectionSchema] = {}
        self.unknown: list[str] = []
        self._values = values
        self._written = written
        self._registry = registry
        self._problems = problems
        self._implied_by_algorithm: dict[KeyPath, dict[str, Any]] = {}

    def resolve_algorithm(self) -> str | None:
        """The section of the algorithm, whose name is returned; it implies values of other sections."""
        self.resolve_built_in("algorithm")
        component = self._algorithm()
        if component is None:
            return None
        path = (component.name,)
        self._values_at(path)
        self._add(path, Kind.ALGORITHM, component)
        model = self.sections[path].model if path in self.sections else None
        if model is not None and issubclass(model, schema.AlgorithmConfig):
            self._implied_by_algorithm = {("loss_fn",): {"name": model.default_loss}, ("policy",): {"head": model.head}}
        return component.name

    def _algorithm(self) -> Component | None:
        """The algorithm of the only non-standard section; additional ones are reported."""
        names = [name for name in self._values if name not in SECTIONS]
        if self._values.get("algorithm") is not None:
            return self._algorithm_by_path(names, self._values["algorithm"])
        found = [component for name in names if (component := self._algorithm_by_section(name)) is not None]
        if len(found) == 1:
            return found[0]
        if found:
            all_found = " and ".join(component.name for component in found)
            self._report(
                f"A config must have exactly one algorithm section, but this one has {all_found}: remove all but one.",
                (found[-1].name,),
            )
        elif not names:
            known = ", ".join(f"{name}:" for name in self._registry.names(Kind.ALGORITHM))
            self._report(
                f"The config has no algorithm section: add one of {known} (it may be empty), or layer it over a packaged "
                "config: `--config grpo.yaml` or `--config sft.yaml`.",
                (),
                at_value=True,
            )
        return None

    def _algorithm_by_section(self, name: str) -> Component | None:
        if is_path(name):
            is_nested = name.partition(".")[0] in SECTIONS
            hint = " Dotted keys only work in overrides: in a file, nest the keys." if is_nested else ""
            hint = hint or " To use an algorithm by its path, set `algorithm: {train: ..., config: ...}`."
            self._report(f"There is no section {name!r}.{hint}", (name,))
            return None
        try:
            return self._registry.find(Kind.ALGORITHM, name)
        except UnknownComponentError:
            self.unknown.append(name)
        except PluginError as error:
            self._report(str(error), (name,))
        return None

    def _algorithm_by_path(self, names: list[str], paths: Any) -> Component | None:
        """A component for the only non-standard section, with the function and the model that `algorithm` names."""
        if len(names) != 1:
            others = f"has {' and '.join(names)}: remove all but one" if names else "has none: add one (it may be empty)"
            asked = "requires a section with its settings, under a name of your choice"
            self._report(f"{asked}, but this config {others}.", ("algorithm",))
            return None
        [name] = names
        if name in self._registry.names(Kind.ALGORITHM):
            location = self._written.nearest(("algorithm",)).key_location
            self._report(
                f"is the name of an algorithm from a plugin, but {location} sets another algorithm by its path: rename the "
                "section, or remove `algorithm`.",
                (name,),
            )
            return None
        if not isinstance(paths, Mapping) or not all(isinstance(paths.get(key), str) for key in _PATHS):
            return None  # reported when the section is validated
        targets = []
        for key in _PATHS:
            try:
                if not is_path(paths[key]):
                    raise UnknownComponentError(f"must be a dotted path, package.module.name; found {paths[key]!r}.")
                targets.append(self._registry.find(Kind.ALGORITHM, paths[key]).target)
            except PluginError as error:
                self._report(str(error), ("algorithm", key), at_value=True)
        if len(targets) < len(_PATHS):
            return None
        try:
            return Component(name, target=targets[0], config=targets[1], summary="given by its path")
        except PluginError as error:
            self._report(str(error), (name,))
            return None

    def report_unknown_section(self, name: str, keys: Sequence[KeyPath]) -> None:
        """Report a section that does not exist; `keys` are those of other sections with this name or this meaning."""
        algorithms = self._registry.names(Kind.ALGORITHM)
        not_installed = [known.name for known in self._registry.not_installed() if known.kind is Kind.ALGORITHM]
        known = [*SECTIONS, *algorithms, *not_installed]
        meant = None if name in {**MEANINGS, **INSTEAD} else nearest(name, known, cutoff=0.7)
        suggested = [(meant,)] if meant else keys[:2]
        self._problems.misspelled.update(path for path in suggested if self._written.at(path) is None)
        if meant:
            hint = f"Did you mean {meant!r}?"
        elif keys:
            hint = f"Did you mean the key {' or '.join(map(dotted, suggested))}?"
        elif name in INSTEAD:
            hint = INSTEAD[name]
        else:
            hint = f"Sections: {', '.join([*algorithms, *SECTIONS])}."
        self._report(f"There is no section {name!r}. {hint}", (name,))

    def _report(self, message: str, path: KeyPath, *, at_value: bool = False) -> None:
        written = self._written.nearest(path)
        self._problems.add(message, location=written.location if at_value else written.key_location, path=path)

    def resolve_built_in(self, name: str) -> None:
        """A section of the runtime. `algorithm` has required keys, so it is only created if the config has it."""
        is_created = name in BUILT_IN and (name != "algorithm" or self._values.get(name) is not None)
        if is_created and self._values_at((name,)) is not None:
            self.sections[name,] = SectionSchema(path=(name,), model=BUILT_IN[name])

    def resolve_with_names(self, name: str) -> None:
        """The sections with names within a section of the runtime."""
        for key in self._values_at((name,)) or {} if name in BUILT_IN_WITH_NAMES else ():
            if self._values_at((name, key)) is not None:
                self.sections[name, key] = SectionSchema(path=(name, key), model=BUILT_IN_WITH_NAMES[name])

    def resolve_slot(self, slot: Slot) -> None:
        """The sections that the config has in a slot, each with the model of its component."""
        for path in self._paths_in(slot):
            section = self._values_at(path)
            if section is not None:
                given = model_at(self._written, path)
                # With the base model, common keys are checked even if the component is not found.
                model = BASES[slot.kind][1] if given is None else type(given)
                self.sections[path] = SectionSchema(path=path, model=model, kind=slot.kind)
                if given is None:
                    self._resolve_component(slot, path, section)

    def _paths_in(self, slot: Slot) -> Iterator[KeyPath]:
        *parents, last = slot.path
        outer = self._values_at(tuple(parents), has_names=last == ANY) or {}
        if last == ANY:
            yield from ((*parents, name) for name in outer)
        elif slot.is_required or outer.get(str(last)) is not None:
            yield slot.path

    def _values_at(self, path: KeyPath, *, has_names: bool = False) -> Mapping[str, Any] | None:
        """The values of a section: empty if it is missing, null or a model, None if it is not a mapping, which is reported."""
        section: Mapping[str, Any] = self._values
        for depth, key in enumerate(path, start=1):
            value = section.get(str(key))
            if self._problems.is_invalid(path[:depth]):
                return None
            if value is None or isinstance(value, BaseModel):
                return {}
            if not isinstance(value, Mapping):
                names = value if has_names and isinstance(value, list) and path[:depth] == path else []
                form = f" Write {{{', '.join(f'{name}: {{}}' for name in names)}}}." if names else ""
                self._problems.mark_invalid(
                    f"must be a section with keys below it; found {show(value)}.{form}",
                    location=self._written.nearest(path[:depth]).location,
                    path=path[:depth],
                )
                return None
            section = value
        return section

    def _resolve_component(self, slot: Slot, path: KeyPath, section: Mapping[str, Any]) -> None:
        implied = {**slot.implied, **self._implied_by_algorithm.get(path, {})}
        key, name = _selection(slot, path, section, implied)
        if name is None:
            self._report_no_selection(slot, path)
            return
        if key is None and slot.selector is not None:
            implied[slot.selector] = name
        component = self._find(slot, path, key, name)
        if component is not None:
            self._add(path, slot.kind, component, implied=implied)

    def _report_no_selection(self, slot: Slot, path: KeyPath) -> None:
        where = (*path, str(slot.selector))
        # Without an algorithm, which is reported, the loss that it implies is unknown.
        if self._problems.is_invalid(where) or (slot.kind is Kind.LOSS and not self._implied_by_algorithm):
            return
        installed = ", ".join(self._registry.names(slot.kind)) or "none"
        reason = "The algorithm's model has no `default_loss`. " if slot.kind is Kind.LOSS else ""
        location = self._written.nearest(path).key_location
        self._problems.add(f"is required. {reason}Installed: {installed}.", location=location, path=where, is_missing=True)
        self._problems.poisoned.add(where)

    def _find(self, slot: Slot, path: KeyPath, key: str | None, name: Any) -> Component | None:
        """The component with a name, which a key of the section sets, or else the section's own key or another of its keys."""
        # An implied name has no location, so problems are reported at the section.
        where, at_value = (path, False) if key is None else ((*path, key), True)
        if not isinstance(name, str):
            self._report(f"must be the name of a {slot.kind.label}; found {show(name)}.", where, at_value=at_value)
            self._problems.poisoned.add(where)
            return None
        if key is not None and key == slot.path_selector and not is_path(name):
            self._report(
                f"must be the dotted path of a class, package.module.Class; found {name!r}. For a registered "
                f"{slot.kind.label}, use `{slot.selector}`.",
                where,
                at_value=True,
            )
            return None
        try:
            if key is not None and key == slot.path_selector and (self._values_at(path) or {}).get("python") is not None:
                return Component.from_path(name)  # runs with another interpreter, which is asked before a run starts
            return self._registry.find(slot.kind, name)
        except PluginError as error:
            hint = ""
            if slot.kind is Kind.ENVIRONMENT and key is None:
                hint = " (A task may have any name: set `name:` or `env_cls:` to choose its environment, or `reward_fn:`.)"
                keys = {written: nearest(str(written), slot.selected_by, cutoff=0.7) for written in self._values_at(path) or {}}
                hint += "".join(f" Did you mean {meant!r} instead of {written!r}?" for written, meant in keys.items() if meant)
            self._report(f"{error}{hint}", where, at_value=at_value)
            return None

    def _add(self, path: KeyPath, kind: Kind, component: Component, *, implied: Mapping[str, Any] | None = None) -> None:
        try:
            model = section_of(component, kind)
        except PluginError as error:
            self._report(str(error), path)
            return
        self.sections[path] = SectionSchema(path=path, model=model, component=component, kind=kind, implied=implied or {})


def _selection(slot: Slot, path: KeyPath, section: Mapping[str, Any], implied: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The key that sets the name of the component, or None if another rule does, and the name, which is None if none does."""
    for key in (slot.path_selector, slot.selector):
        if key is not None and section.get(key) is not None:
            return key, section[key]
    for key, name in slot.selected_by.items():
        if key in section:
            return None, name
    if slot.is_named_by_key:
        return None, path[-1]
    return slot.selector, implied.get(str(slot.selector))
