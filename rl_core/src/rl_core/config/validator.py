"""Validates plain values with a section's model, from a file or from Python, and reports errors in terms of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rl_core.config.diagnostics import (
    KEY_CUTOFF,
    KeyPath,
    Node,
    Problems,
    SourceLocation,
    dotted,
    nearest,
    node_from_plain,
    override_named,
    show,
)
from rl_core.config.introspection import (
    Field,
    Model,
    all_fields,
    allows_bool,
    choices,
    describe_type,
    find_field,
    inner_annotation,
)
from rl_core.config.section import Section
from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean

_MOST_KEYS_LISTED = 30
_WRONG_VALUE = {
    "literal_error", "enum", "int_from_float", "finite_number", "greater_than", "greater_than_equal", "less_than",
    "less_than_equal", "multiple_of", "too_short", "too_long", "string_too_short", "string_too_long",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Validates sections, one at a time.

    Attributes:
        written: The values with their source locations.
        problems: Receives what is wrong.
        find_elsewhere: The full keys of all sections that end in a name, for suggestions.
        instead: What to do instead of setting a key that does not exist, by its name.
    """

    written: Node
    problems: Problems
    find_elsewhere: Callable[[str], list[KeyPath]]
    instead: Mapping[str, str] = field(default_factory=dict)

    def validate(self, model: Model, values: Mapping[str, Any], *, path: KeyPath) -> BaseModel | None:
        """The section at `path` as its model, or None if something is wrong; sections within it may already be instances."""
        before = len(self.problems.found)
        self._reject_accidental_numbers(model, values, path=path)
        try:
            instance = model.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                self._report(detail, model=model, values=values, path=path)
            return None
        except Exception as error:  # a validator of a plugin's model may raise anything
            self.problems.add(
                f"the model {model.__module__}.{model.__qualname__} failed on it ({type(error).__name__}: {error}). This "
                "is a bug in the distribution that defines this model.",
                location=self.written.nearest(path).key_location,
                path=path,
            )
            return None
        return instance if len(self.problems.found) == before else None

    def _reject_accidental_numbers(self, model: Model, values: Mapping[str, Any], *, path: KeyPath) -> None:
        """Reports values that pydantic would accept as numbers: true and false as 1 and 0, and NaN in a free mapping."""
        for leaf, value in _scalars(values):
            at = (*path, *leaf)
            field = find_field(model, leaf, prefix=path)
            if isinstance(value, bool):
                if field is not None and not field.is_free and not allows_bool(field.info.annotation):
                    self._wrong_value(field, at, value)
                    self.problems.poisoned.add(at)
            elif math.isnan(value) and (field is None or field.is_free):
                self.problems.mark_invalid("must be a number; found .nan.", location=self.written.nearest(at).location, path=at)

    def _report(self, detail: ErrorDetails, *, model: Model, values: Any, path: KeyPath) -> None:
        inner, value = _walk(values, detail["loc"])
        where = (*path, *inner)
        kind = detail["type"]
        if kind == "missing":
            where = (*where, str(detail["loc"][-1]))
        if self.problems.is_invalid(where):
            return
        field = find_field(model, where[len(path) :], prefix=path)
        if kind == "missing":
            self._missing(field, where)
        elif kind == "extra_forbidden":
            self._unknown_key(model, where, section=path, values=values)
        elif kind in ("value_error", "assertion_error"):
            reason = _reason(detail)
            location = override_named(self.written, where, reason) or self.written.nearest(where).key_location
            self.problems.add(reason, location=location, path=where)
        elif kind in _WRONG_VALUE or kind.endswith(("_type", "_parsing")):
            self._wrong_value(field, where, value, model=model, section=path)
        else:
            message = f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {show(value)}."
            self.problems.add(message, location=self.written.nearest(where).location, path=where)

    def _missing(self, field: Field | None, path: KeyPath) -> None:
        message = "is required."
        if field is not None:
            message += f" {field.summary.rstrip('.')}." if field.summary else ""
            message += f" Allowed: {field.allowed}." if field.allowed != "text" else ""
        self.problems.add(message, location=self.written.nearest(path[:-1]).key_location, path=path, is_missing=True)

    def _wrong_value(
        self, field: Field | None, path: KeyPath, value: Any, *, model: Model | None = None, section: KeyPath = ()
    ) -> None:
        if field is None or field.is_free:
            allowed, options = self._allowed_within(model, path[len(section) :])
        else:
            allowed, options = field.allowed, choices(field.info.annotation)
        meant = nearest(value, [o for o in options if isinstance(o, str)]) if isinstance(value, str) else None
        hint = f" Did you mean {show(meant)}?" if meant else ""
        written = self.written.at(path)
        if written is not None and written.text is not None and not isinstance(written.value, str) and "text" in allowed:
            hint = f" YAML does not read {written.text!r} as text: quote it if text is meant."
        location = self.written.nearest(path).location
        self.problems.add(f"must be {allowed}; found {show(value)}.{hint}", location=location, path=path)

    @staticmethod
    def _allowed_within(model: Model | None, path: KeyPath) -> tuple[str, list[Any]]:
        """Allowed values of a list item or a mapping value."""
        for length in range(len(path) - 1, 0, -1):
            outer = find_field(model, path[:length]) if model is not None else None
            if outer is not None and not outer.is_free:
                annotation = inner_annotation(outer.info.annotation, path[length:])
                return describe_type(annotation), choices(annotation)
        return "something else", []

    def _unknown_key(self, model: Model, path: KeyPath, *, section: KeyPath, values: Any) -> None:
        name = str(path[-1])
        here = path[:-1]
        written = self.written.nearest(path)
        field = find_field(model, here[len(section) :]) if here != section else None
        keys = list(((field.model if field is not None else None) or model).model_fields)
        other = self._section_of_other_backend(name, keys, values) if here == section else None
        message = other or f"{dotted(here) or model.__name__} has no key {name!r}.{self._suggestion(name, keys, here)}"
        self.problems.add(message, location=written.key_location, path=path)

    def _suggestion(self, name: str, keys: list[str], here: KeyPath) -> str:
        if "." in name:
            return " Dotted keys only work in overrides: in a file, nest the keys."
        elsewhere = self.find_elsewhere(name)
        own = [str(path[-1]) for path in elsewhere if path[:-1] == here]
        if elsewhere and not own:
            self.problems.misspelled.update(path for path in elsewhere[:2] if self.written.at(path) is None)
            return f" Did you mean {' or '.join(dotted(path) for path in elsewhere[:2])}?"
        if name in self.instead and not own:
            return f" {self.instead[name]}"
        if (meant := own[0] if own else nearest(name, keys, cutoff=KEY_CUTOFF)) is not None:
            self.problems.misspelled.update({(*here, meant)} if self.written.at((*here, meant)) is None else ())
            return f" Did you mean {meant!r}?"
        shown = ", ".join(keys[:_MOST_KEYS_LISTED]) + (", ..." if len(keys) > _MOST_KEYS_LISTED else "")
        return f" Allowed keys: {shown}." if keys else " It takes no keys."

    @staticmethod
    def _section_of_other_backend(name: str, keys: list[str], values: Any) -> str | None:
        chosen = values.get("backend") if isinstance(values, Mapping) else None
        own = [key for key in keys if key.endswith("_cfg")]
        if not (isinstance(chosen, str) and name.endswith("_cfg")) or nearest(name, own) is not None:
            return None
        its = f"its own section is {', '.join(own)}" if own else "it has no own section"
        return (
            f"{name} is not a section of the backend {chosen!r} ({its}); NAME_cfg is the section of the backend NAME: "
            "remove it or change the backend. (If it is inherited, `_override_: true` in its parent section replaces what is "
            "inherited.)"
        )


def _reason(detail: ErrorDetails) -> str:
    error = detail.get("ctx", {}).get("error")
    text = str(error) if error is not None else detail["msg"]
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _walk(values: Any, loc: tuple[int | str, ...]) -> tuple[KeyPath, Any]:
    """The path of an error within the values, and the value there; names of union alternatives in `loc` are skipped."""
    path: list[int | str] = []
    for part in loc:
        holder = dict(enumerate(values)) if isinstance(values, list) else values
        if isinstance(holder, Mapping) and part in holder:
            values = holder[part]
            path.append(part)
    return tuple(path), values


def _scalars(values: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _scalars(value, (*path, key))
    elif isinstance(values, (bool, float)):
        yield path, values


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
