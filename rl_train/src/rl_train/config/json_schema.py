"""The JSON schema of config files, for editors: completion, documentation and basic checks of every installed section.

It is more permissive than the loader: a file may omit what another file sets, and any value may be `${...}`.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from rl_core.config.introspection import Model
from rl_core.plugins.component import Kind
from rl_train.config.schema_index import SchemaIndex
from rl_train.config.section_resolver import BASES, COMPANIONS, FUNCTION_KEYS, FUNCTIONS, SECTIONS
from rl_train.yaml_reader import MARKS

_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_PATH = {"type": "string", "pattern": r"[.:]"}
_MARKS = {mark: {"type": "boolean"} for mark in MARKS}
_SELECTORS = {
    Kind.LOSS: "name",
    Kind.POLICY: "backend",
    Kind.GENERATION: "backend",
    Kind.DATASET: "dataset_name",
    Kind.ENVIRONMENT: "name",
}


def json_schema(schema_index: SchemaIndex) -> dict[str, Any]:
    """The schema of a config file.

    Args:
        schema_index: The sections; each model becomes a definition.
    """
    models = list(dict.fromkeys([*(part.model for part in schema_index.parts), *(pair[0] for pair in BASES.values())]))
    references, schema = models_json_schema([(model, "validation") for model in models], ref_template="#/$defs/{model}")
    reference_of = {model: reference for (model, _), reference in references.items()}
    definitions = {name: _relaxed(definition) for name, definition in schema["$defs"].items()}
    of_kind = {kind: _by_name(schema_index.of_kind(kind), reference_of) for kind in BASES}
    sections = {kind: _chosen(kind, of_kind[kind]) for kind in _SELECTORS}
    _put(definitions, reference_of, schema_index, {"generation": _or_null(sections[Kind.GENERATION])})
    dataset = _or_null(sections[Kind.DATASET])
    datasets = {"type": "object", "additionalProperties": dataset}
    data = {"train": dataset, "validation": dataset, "validation_sets": datasets, "mix": datasets}
    definitions["DataConfig"]["properties"] |= data
    loggers = {name: _or_null(reference) for name, reference in of_kind[Kind.LOGGER].items()}
    definitions["LoggingConfig"]["properties"]["loggers"] = {"type": "object", "properties": loggers}
    properties = {
        "defaults": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        **_MARKS,
        **{name: _or_null(reference) for name, reference in of_kind[Kind.ALGORITHM].items()},
        "loss_fn": _or_null(sections[Kind.LOSS]),
        **{name: _or_null(sections[Kind.POLICY]) for name in ("policy", *COMPANIONS)},
        "env": _or_null(_environments(of_kind[Kind.ENVIRONMENT])),
        **{name: _or_null(reference_of[model]) for name, model in SECTIONS.items() if model is not None},
    }
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


def _by_name(models: dict[str, Model], reference_of: dict[Any, Any]) -> dict[str, Any]:
    return {name: reference_of[model] for name, model in models.items()}


def _chosen(kind: Kind, sections: dict[str, Any]) -> dict[str, Any]:
    """A section whose keys depend on the component that it names; any keys are allowed for a class path."""
    key = _SELECTORS[kind]
    names = {"anyOf": [{"enum": [*sections, None]}, _PATH, _INTERPOLATION]}
    return {
        "type": "object",
        "properties": {key: names},
        "allOf": [
            {"if": {"properties": {key: {"const": name}}, "required": [key]}, "then": section}
            for name, section in sections.items()
        ],
    }


def _environments(sections: dict[str, Any]) -> dict[str, Any]:
    """The tasks: each by `name`, `env_cls` or reward functions, or by its key if none of them is set."""
    chosen = _chosen(Kind.ENVIRONMENT, sections)
    has_functions = {"anyOf": [{"required": [key]} for key in FUNCTION_KEYS]}
    if FUNCTIONS in sections:
        unnamed = {**has_functions, "not": {"anyOf": [{"required": ["name"]}, {"required": ["env_cls"]}]}}
        chosen["allOf"].append({"if": unnamed, "then": sections[FUNCTIONS]})
    names_environment = {"anyOf": [{"required": [key]} for key in ("name", "env_cls", *FUNCTION_KEYS)]}
    return {
        "type": "object",
        "properties": {
            name: _or_null({"if": names_environment, "then": chosen, "else": section}) for name, section in sections.items()
        }
        | _MARKS,
        "additionalProperties": _or_null(chosen),
    }


def _put(
    definitions: dict[str, Any], reference_of: dict[Any, Any], schema_index: SchemaIndex, properties: dict[str, Any]
) -> None:
    for model in (*schema_index.of_kind(Kind.POLICY).values(), BASES[Kind.POLICY][0]):
        name = reference_of[model]["$ref"].removeprefix("#/$defs/")
        definitions[name]["properties"] |= properties


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
