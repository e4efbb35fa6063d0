"""Sections given in Python as keyword arguments or dicts, with the same errors as in a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rl_core.config.diagnostics import Problems
from rl_core.config.introspection import all_fields
from rl_core.config.section import Section
from rl_core.config.source_tree import KeyPath, SourceLocation, node_from_plain
from rl_core.config.validator import Validator
from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_section(model: type[ModelT], section: ModelT | Mapping[str, Any] | None, *, who: str | None = None) -> ModelT:
    """The section as its model, from the model itself, a dict such as YAML contains, or None.

    Args:
        model: The section's model.
        section: The section.
        who: The class that was called, named first in errors; the model by default.

    Raises:
        ConfigError: A key is unknown or a value is not allowed; one line each.
    """
    if isinstance(section, model):
        return section
    return section_of_values(model, dict(section or {}), name="", who=who or model.__name__)


def section_of_values(model: type[ModelT], values: Mapping[str, Any], *, name: str, who: str | None = None) -> ModelT:
    """The section as its model.

    Args:
        model: The section's model.
        values: Its keys; sections within it may be instances.
        name: The section's key, which errors begin with; '' for keyword arguments.
        who: The class that was called, named first in errors.

    Raises:
        ConfigError: A key is unknown or a value is not allowed. Lists all errors, one per line, each with what is allowed and a
            suggestion.
    """
    path: KeyPath = tuple(name.split(".")) if name else ()
    problems = Problems()

    def ending_in(key: str) -> list[KeyPath]:
        return [field.path for field in all_fields(model, prefix=path) if field.name.casefold() == key.casefold()]

    plain = {key: value for key, value in values.items() if not isinstance(value, BaseModel)}
    validator = Validator(
        written=node_from_plain(plain, location=SourceLocation(source=who or "")), problems=problems, find_elsewhere=ending_in
    )
    instance = validator.validate(model, values, path=path)
    if instance is None:
        prefix = f"{who}: " if who else ""
        raise ConfigError("\n".join(f"{prefix}{problem.text}" for problem in problems.found))
    assert isinstance(instance, model)
    return instance


SectionT = TypeVar("SectionT", bound=Section)


def section_from_keywords(
    who: str,
    model: type[SectionT],
    *,
    own: str,
    fields: Mapping[str, Any],
    model_name: str | None = None,
    torch_dtype: Any = None,
    config: SectionT | None = None,
    nested: Mapping[str, tuple[type[BaseModel], Mapping[str, Any]]] | None = None,
) -> SectionT:
    """The section that results from keyword arguments.

    Args:
        who: the class that was called, for errors.
        model: the section's model.
        own: the key of the backend's own section in it, such as "hf_cfg"; its fields may be given next to those of `model`.
        fields: the arguments by name.
        model_name: the field of that name; None if it was not given.
        torch_dtype: `precision` by its documented name, as text or as a torch dtype; None if it was not given.
        config: a whole section; mutually exclusive with `fields`.
        nested: the model, and its defaults, of a field that may be given as a plain mapping.

    Raises:
        ConfigError: a whole section and additional fields, no model, an unknown field, or an invalid value.
    """
    keywords = dict(fields)
    if model_name is not None:
        keywords["model_name"] = model_name
    if torch_dtype is not None:
        keywords["precision"] = str(torch_dtype).removeprefix("torch.")
    if config is not None:
        if keywords:
            raise ConfigError(
                f"{who} got a whole `config` and additional fields. Put the fields into the config, for example with "
                "`config.model_copy(update={...})`."
            )
        return config
    if keywords.get("model_name") is None:
        raise ConfigError(f"{who} needs a model: model_name='path/to/model', or config={model.__name__}(...).")
    own_model = model.model_fields[own].annotation
    assert isinstance(own_model, type)
    assert issubclass(own_model, BaseModel)
    values, own_values = _split_keywords(who, keywords, model, own, own_model)
    for key, (inner, defaults) in (nested or {}).items():
        if isinstance(values.get(key), Mapping):
            values[key] = section_of_values(inner, {**defaults, **values[key]}, name=key, who=who)
    return section_of_values(model, {**values, own: own_values}, name="", who=who)


def _split_keywords(
    who: str, keywords: dict[str, Any], model: type[Section], own: str, own_model: type[BaseModel]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the section, and those of the backend's own section in it."""
    own_values = dict(keywords.pop(own, None) or {})
    values: dict[str, Any] = {}
    for key, value in keywords.items():
        if key in model.model_fields or key in getattr(model, "transformers_keys", ()):
            values[key] = value
        elif key in own_model.model_fields:
            own_values[key] = value
        else:
            known = sorted({*model.model_fields, *own_model.model_fields, "torch_dtype", "cluster"})
            raise ConfigError(
                f"{who} has no argument {key!r}.{did_you_mean(key, known)} It takes the fields of {model.__name__} and "
                f"`{own}`: {', '.join(known)}."
            )
    return values, own_values
