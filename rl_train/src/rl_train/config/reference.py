"""Every section that a config can have with the installed plugins, as a reference page and as a JSON schema.

Used by `rlcore explain` and `rlcore schema`. Does not read configs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from rl_core.config.diagnostics import KeyPath, dotted
from rl_core.config.introspection import NO_DEFAULT, Field, Model, declaring_model
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind, Status
from rl_core.plugins.registry import Registry
from rl_train.config.schema import BASES, section_of
from rl_train.config.section_resolver import BUILT_IN, BUILT_IN_WITH_NAMES
from rl_train.config.slots import ANY, SLOTS, SectionSchema, Slot, matches, slots_of
from rl_train.yaml_reader import MARKS


@dataclass(frozen=True, kw_only=True)
class SchemaIndex:
    """All sections.

    Attributes:
        sections: Each section of each component, and the built-in ones; one key may have several.
        unusable: One sentence for each component whose model cannot be loaded.
    """

    sections: tuple[SectionSchema, ...]
    unusable: tuple[str, ...]

    def of_kind(self, kind: Kind) -> dict[str, Model]:
        """The models of the components of a kind, by name."""
        return {
            section.component.name: section.model
            for section in self.sections
            if section.kind is kind and section.component is not None
        }

    def find(self, path: KeyPath) -> list[tuple[SectionSchema, Field]]:
        """The fields that a key may refer to: one for each component with that key."""
        candidates = []
        for section in self.sections:
            enclosing = path[: len(section.path)]
            if len(path) > len(enclosing) and matches(section.path, enclosing):
                field = replace(section, path=enclosing).find(path)
                if field is not None:
                    candidates.append((section, field))
        # The backends' own models describe `policy.generation` better than the base model.
        deepest = max((len(section.path) for section, _ in candidates), default=0)
        return [(section, field) for section, field in candidates if len(section.path) == deepest]


def schema_index(registry: Registry, *, plugins: Collection[str] | None = None) -> SchemaIndex:
    """The built-in sections and those of installed, working components.

    Args:
        registry: The plugins.
        plugins: Names of plugins to take components from; all of them by default.
    """
    sections = [SectionSchema(path=(name,), model=model) for name, model in BUILT_IN.items()]
    sections += [SectionSchema(path=(name, ANY), model=model) for name, model in BUILT_IN_WITH_NAMES.items()]
    unusable = []
    for registration in registry.manager.registrations:
        kind, component, plugin = registration.kind, registration.component, registration.plugin
        if not slots_of(kind) or plugin.status is not Status.READY:
            continue
        if plugins is not None and plugin.name not in plugins:
            continue
        try:
            model = section_of(component, kind)
        except PluginError as error:
            unusable.append(str(error))
            continue
        for slot in slots_of(kind):
            path = slot.path if slot.selector is not None else (*slot.path[:-1], component.name)
            sections.append(SectionSchema(path=path, model=model, component=component, kind=kind, implied=slot.implied))
    return SchemaIndex(sections=tuple(sections), unusable=tuple(unusable))


_HEAD = """# Config reference

Every section and key, with its default and allowed values. See `docs/config.md` for files, overrides and `${...}`.

A component has the keys of its table and of each table above that names it or all components of its kind. If both have a
key, its own counts.

This page is generated from the models: `rlcore schema --markdown --plugins {plugins} --output docs/config_reference.md`.
"""


def reference(schema_index: SchemaIndex, *, plugins: str) -> str:
    """The config reference as Markdown.

    Args:
        schema_index: The sections.
        plugins: The plugins in the index, for the command shown on the page.
    """
    # One table for each component, at the first slot of its kind.
    same_as_first = [slot.path for slot in SLOTS if slot is not slots_of(slot.kind)[0]]
    sections = [section for section in schema_index.sections if section.path not in same_as_first]
    lines = [_HEAD.replace("{plugins}", plugins)]
    for section in sorted((each for each in sections if each.component is None), key=lambda each: dotted(each.path)):
        lines.extend([_heading(section), *_table([row for row, _ in _rows_with_owner(section)])])
    for kind in sorted({section.kind for section in sections if section.kind}, key=lambda kind: dotted(slots_of(kind)[0].path)):
        members = sorted((section for section in sections if section.kind is kind), key=_name)
        lines.append(_heading_of_kind(kind))
        inherited = _inherited_rows(members)
        for base, rows in inherited.items():
            lines.extend([_heading_of_base(base, kind, members), *_table(rows)])
        for section in members:
            own = [row for row, owner in _rows_with_owner(section) if row not in inherited.get(owner, [])]
            lines.extend([_heading(section), *_table(own)])
    return "\n".join(lines).rstrip() + "\n"


def _inherited_rows(sections: list[SectionSchema]) -> dict[Model, list[str]]:
    """The rows that several components have from the same base of their models, by base."""
    counts = Counter(row_and_owner for section in sections for row_and_owner in _rows_with_owner(section))
    inherited: dict[Model, list[str]] = {}
    for (row, owner), number in counts.items():
        if number > 1:
            inherited.setdefault(owner, []).append(row)
    return inherited


def _name(section: SectionSchema) -> str:
    return "" if section.component is None else section.component.name


def _heading(section: SectionSchema) -> str:
    if section.component is None or section.kind is None:
        first_line = (section.model.__doc__ or "").strip().split("\n")[0]
        return f"## `{dotted(section.path)}`\n\n{first_line}\n"
    return f"### {section.kind.label.capitalize()} `{section.component.name}`\n\n{section.component.summary}.\n"


def _heading_of_kind(kind: Kind) -> str:
    places = [f"`{dotted(slot.path)}`".replace(f"env.{ANY}", "env.<task>") for slot in slots_of(kind)]
    sections = f"Section{'s' if len(places) > 1 else ''} {_enumerated(places)}"
    return f"## {_plural(kind).capitalize()}\n\n{sections}.\n"


def _heading_of_base(base: Model, kind: Kind, sections: list[SectionSchema]) -> str:
    sharing = [section for section in sections if issubclass(section.model, base)]
    names = f"all {_plural(kind)}" if sharing == sections else _enumerated([f"`{_name(section)}`" for section in sharing])
    return f"### Keys of {names}\n"


def _plural(kind: Kind) -> str:
    return kind.label + ("es" if kind.label.endswith("s") else "s")


def _enumerated(words: list[str]) -> str:
    return " and ".join(", ".join(words).rsplit(", ", 1))


def _rows_with_owner(section: SectionSchema) -> Iterator[tuple[str, Model]]:
    """The rows of a section's table, each with the model that declares its outermost key."""
    for field in section.fields():
        if not _has_own_table(field, section) and (field.model is None or field.default is None):
            path = field.path[len(section.path) :]
            row = f"| `{dotted(path)}` | {_default(field)} | {_cell(field.allowed)} | {_cell(field.meaning)} |"
            yield row, declaring_model(section.model, str(path[0]))


def _table(rows: list[str]) -> Iterator[str]:
    if not rows:
        return
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    yield from rows
    yield ""


def _has_own_table(field: Field, section: SectionSchema) -> bool:
    """Whether the key belongs to a section of another component, which has its own table."""
    depths = range(len(section.path) + 1, len(field.path))
    return any(slot.path == field.path[:depth] for depth in depths for slot in SLOTS)


def _default(field: Field) -> str:
    if field.default is NO_DEFAULT:
        return "required"
    return f"`{_cell(json.dumps(field.default, ensure_ascii=False))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_PATH = {"type": "string", "pattern": r"[.:]"}
_MARKS = {mark: {"type": "boolean"} for mark in MARKS}


def json_schema(schema_index: SchemaIndex) -> dict[str, Any]:
    """The schema of a config file, for editors: completion, documentation and basic checks of every section.

    It is more permissive than the loader: a file may omit what another file sets, and any value may be `${...}`.

    Args:
        schema_index: The sections; each model becomes a definition.
    """
    models = [*(section.model for section in schema_index.sections), *(base for base, _ in BASES.values())]
    inputs: list[tuple[Model, Literal["validation"]]] = [(model, "validation") for model in dict.fromkeys(models)]
    references, schema = models_json_schema(inputs, ref_template="#/$defs/{model}")
    reference_of: dict[Any, Any] = {model: reference for (model, _), reference in references.items()}
    definitions = {name: _relaxed(definition) for name, definition in schema["$defs"].items()}
    properties: dict[str, Any] = {
        "defaults": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        **_MARKS,
    }
    for slot in SLOTS:
        outer, added = _properties(slot, {name: reference_of[model] for name, model in schema_index.of_kind(slot.kind).items()})
        if not outer:
            properties |= added
        for model in _models_at(outer, schema_index):
            definitions[reference_of[model]["$ref"].removeprefix("#/$defs/")]["properties"] |= added
    properties |= {name: _or_null(reference_of[model]) for name, model in BUILT_IN.items()}
    for name, model in BUILT_IN_WITH_NAMES.items():
        properties[name] = _or_null(
            {"type": "object", "properties": _MARKS, "additionalProperties": _or_null(reference_of[model])}
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of rlcore",
        "type": "object",
        # The settings of an algorithm given by its path are in a section with any name.
        "if": {"required": ["algorithm"]},
        "else": {"propertyNames": {"enum": list(properties)}},
        "properties": properties,
        "$defs": definitions,
    }


def _models_at(path: KeyPath, schema_index: SchemaIndex) -> list[Model]:
    """The models of a section: of each component that it may belong to, and their base."""
    models = [section.model for section in schema_index.sections if section.path == path]
    return [*models, *(BASES[slot.kind][0] for slot in SLOTS if slot.path == path)]


def _properties(slot: Slot, sections: dict[str, Any]) -> tuple[KeyPath, dict[str, Any]]:
    """The key of the section that contains a slot, and the properties that the slot adds there.

    Args:
        slot: The slot.
        sections: The section of each component of its kind, by name.
    """
    if slot.path[-1] != ANY:
        return slot.path[:-1], {str(slot.path[-1]): _or_null(_selected(slot, sections))}
    if len(slot.path) == 1:
        return (), {name: _or_null(section) for name, section in sections.items()}
    *outer, name = slot.path[:-1]
    return tuple(outer), {str(name): _named_sections(slot, sections)}


def _named_sections(slot: Slot, sections: dict[str, Any]) -> dict[str, Any]:
    """A section of sections with names that the user chooses, some of which may name a component."""
    if not slot.is_named_by_key:
        return {"type": "object", "additionalProperties": _or_null(_selected(slot, sections))}
    if slot.selector is None:
        return {"type": "object", "properties": {name: _or_null(section) for name, section in sections.items()}}
    selected = _selected(slot, sections)
    selectors = [key for key in (slot.selector, slot.path_selector, *slot.selected_by) if key is not None]
    by_name = {
        name: _or_null({"if": _has_any(selectors), "then": selected, "else": section}) for name, section in sections.items()
    }
    return _or_null({"type": "object", "properties": by_name | _MARKS, "additionalProperties": _or_null(selected)})


def _selected(slot: Slot, sections: dict[str, Any]) -> dict[str, Any]:
    """A section whose keys depend on the component that it selects; any keys are allowed for a class path."""
    key = str(slot.selector)
    selected: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"anyOf": [{"enum": [*sections, None]}, _PATH, _INTERPOLATION]}},
        "allOf": [
            {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": section}
            for name, section in sections.items()
        ],
    }
    named_by = [key for key in (slot.selector, slot.path_selector) if key is not None]
    for name in dict.fromkeys(slot.selected_by.values()):
        keys = [key for key, selects in slot.selected_by.items() if selects == name]
        if name in sections:
            selected["allOf"].append({"if": {**_has_any(keys), "not": _has_any(named_by)}, "then": sections[name]})
        named_by = [*named_by, *keys]
    return selected


def _has_any(keys: list[str]) -> dict[str, Any]:
    return {"anyOf": [{"required": [key]} for key in keys]}


def _relaxed(definition: dict[str, Any]) -> dict[str, Any]:
    """A definition with optional keys and values that may be interpolated."""
    if definition.get("type") != "object" or "properties" not in definition:
        return definition
    relaxed = {key: value for key, value in definition.items() if key != "required"}
    relaxed["properties"] = {name: _or_interpolated(value) for name, value in definition["properties"].items()}
    if relaxed.get("additionalProperties") is False:
        relaxed["properties"] |= _MARKS
    return relaxed


def _or_interpolated(value: dict[str, Any]) -> dict[str, Any]:
    outer = {key: item for key, item in value.items() if key in ("title", "description", "default")}
    inner = {key: item for key, item in value.items() if key not in outer}
    if not inner:
        return outer
    alternatives = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    return {**outer, "anyOf": [*alternatives, _INTERPOLATION]}


def _or_null(section: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [section, {"type": "null"}, _INTERPOLATION]}
