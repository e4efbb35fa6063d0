"""The JSON schema of config files, for editors: completion, documentation and basic checks of every installed section.

It is more permissive than the loader: a file may omit what another file sets, and any value may be `${...}`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic.json_schema import models_json_schema

from rl_core.config.introspection import Model
from rl_core.config.source_tree import KeyPath
from rl_train.config.schema_index import SchemaIndex
from rl_train.config.section_models import BASES
from rl_train.config.section_resolver import BUILT_IN
from rl_train.config.slots import ANY, SLOTS, Slot
from rl_train.yaml_reader import MARKS

_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_PATH = {"type": "string", "pattern": r"[.:]"}
_MARKS = {mark: {"type": "boolean"} for mark in MARKS}


def json_schema(schema_index: SchemaIndex) -> dict[str, Any]:
    """The schema of a config file.

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
