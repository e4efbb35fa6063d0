"""Sections of a config with invalid keys, for rules about the other keys. Reading an invalid key raises an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import BaseModel, create_model, model_validator

from rl_core.config.introspection import Model
from rl_core.config.source_tree import KeyPath, dotted
from rl_core.errors import RLCoreError


class UnavailableError(RLCoreError):
    """Something that a rule reads is invalid, and reported as such. The message says what."""


class _PartialSection(BaseModel):
    """Base of sections of which only some names can be read."""

    unavailable_names: ClassVar[frozenset[str]] = frozenset()
    section_key: ClassVar[KeyPath] = ()

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).unavailable_names:
            raise UnavailableError(dotted((*type(self).section_key, name)))
        return super().__getattribute__(name)


_CHEAP = {"use_attribute_docstrings": False, "defer_build": True}
"""Settings of models with a single instance. Without them, Pydantic searches all imported modules for the source of each class,
up to 0.1 seconds, and creates a validator also for a section of which nothing can be read."""


def partial_section(
    model: Model, values: Mapping[str, Any], *, path: KeyPath, unknown: Collection[str], is_component: bool = True
) -> BaseModel:
    """An instance of a section's model that raises `UnavailableError` where a key is read whose value is not known.

    Args:
        model: The model.
        values: The values of the section, which may be invalid.
        path: The key of the section.
        unknown: Its keys whose values are not known. If the others are invalid without them, none is.
        is_component: Whether `model` is the model of the section's component. If it is not, because the component was not
            found, what the component would define (methods and properties) cannot be read either.
    """
    is_open = model.model_config.get("extra") == "allow"
    given = {key: value for key, value in values.items() if key not in unknown and (is_open or key in model.model_fields)}
    unavailable = {*unknown, *(() if is_component else _names_of(model))}
    if not unavailable and not any(map(_holds_sections, given.values())):
        return model.model_validate(given)
    partial = _partial_model(
        model, path, unavailable, unchecked=[key for key, value in given.items() if _holds_sections(value)]
    )
    try:
        return partial.model_validate(given)
    except Exception:  # the validation of the section reported it; a validator of a plugin's model may raise anything
        return unavailable_section(model, path)


def unavailable_section(model: Model, path: KeyPath) -> BaseModel:
    """An instance of a section's model of which nothing can be read."""
    return _partial_model(model, path, {*model.model_fields, *_names_of(model)}).model_construct()


def _tolerant(validate: Callable[[Any], Any]) -> Any:
    """A validator of the whole section that demands nothing about keys that are not available."""

    @model_validator(mode="after")
    def check(section: BaseModel) -> BaseModel:
        with suppress(UnavailableError):
            validate(section)
        return section

    return check


def _names_of(model: Model) -> set[str]:
    """What a model defines in addition to its fields and to what every model has."""
    return {name for name in dir(model) if not name.startswith("_") and not hasattr(BaseModel, name)}


def _holds_sections(value: object) -> bool:
    """Whether a value is a section, or several by name; validated again, it would read what is not available."""
    return isinstance(value, BaseModel) or (isinstance(value, dict) and any(isinstance(it, BaseModel) for it in value.values()))


def _partial_model(model: Model, path: KeyPath, unavailable: Collection[str], *, unchecked: Collection[str] = ()) -> Model:
    """A subclass of the model, so that rules recognize it, with fields of any type where nothing is validated."""
    names = (name for name in {*unavailable, *unchecked} if name in model.model_fields)
    fields: dict[str, Any] = dict.fromkeys(names, (Any, None))
    validators = model.__pydantic_decorators__.model_validators.items()
    tolerant = {name: _tolerant(found.func) for name, found in validators if found.info.mode == "after"}
    partial: Model = create_model(
        model.__name__, __base__=(_PartialSection, model), __validators__=tolerant, __cls_kwargs__=_CHEAP, **fields
    )
    partial.unavailable_names, partial.section_key = frozenset(unavailable), path  # type: ignore[attr-defined]
    return partial
