"""Sections given in Python as keyword arguments or dicts, with the same errors as in a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from rl_core.config.diagnostics import Problems
from rl_core.config.introspection import all_fields
from rl_core.config.source_tree import KeyPath, SourceLocation, node_from_plain
from rl_core.config.validator import Validator
from rl_core.errors import ConfigError

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
