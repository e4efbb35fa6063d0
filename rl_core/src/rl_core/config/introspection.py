"""Inspects the models of sections: their keys, allowed values and defaults. Independent of the sections."""

from __future__ import annotations

import enum
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rl_core.config.diagnostics import KeyPath, show

Model = type[BaseModel]

NO_DEFAULT = object()
"""Marks a missing default; null is a default."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key of a model, or of a free mapping within it.

    Attributes:
        path: The whole key.
        owner: The model that declares it.
        name: The field of that model; for a free key, the field that contains the mapping.
        info: That field.
        is_free: Whether the key belongs to a free mapping, which accepts any key.
        default: Its default as plain data; `NO_DEFAULT` if it is required.
    """

    path: KeyPath
    owner: Model
    name: str
    info: FieldInfo
    is_free: bool = False
    default: Any = NO_DEFAULT

    @property
    def model(self) -> Model | None:
        """The model of a section; None for a value."""
        return None if self.is_free else section_model(self.info.annotation)

    @property
    def meaning(self) -> str:
        """Its docstring on one line."""
        return " ".join((self.info.description or "").split())

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        sentence, dot, _ = self.meaning.partition(". ")
        return sentence + dot.strip()

    @property
    def type_name(self) -> str:
        """Its type in Python notation; `Any` for a free key."""
        return "Any" if self.is_free else type_name(self.info.annotation)

    @property
    def allowed(self) -> str:
        """Its allowed values, for a sentence: `a whole number, 1 or more`."""
        return "anything" if self.is_free else describe(self.info)


def find_field(model: Model, path: KeyPath, *, prefix: KeyPath = ()) -> Field | None:
    """The field at a path within a model, whose own key is `prefix`, or None if the model has no such key."""
    if not path:
        return None
    name, rest = str(path[0]), path[1:]
    if name not in model.model_fields:
        return None
    field = _field(model, name, prefix)
    if not rest:
        return field
    if field.model is not None:
        return find_field(field.model, rest, prefix=field.path)
    listed = _entry_of_mapping(field, rest)
    if listed is not None or not holds_free_keys(field.info.annotation):
        return listed
    default = field.default
    for part in rest:
        default = default.get(part, NO_DEFAULT) if isinstance(default, dict) else NO_DEFAULT
    return replace(field, path=(*field.path, *rest), is_free=True, default=default)


def _field(model: Model, name: str, prefix: KeyPath) -> Field:
    info = model.model_fields[name]
    return Field(path=(*prefix, name), owner=declaring_model(model, name), name=name, info=info, default=plain_default(info))


def _entry_of_mapping(field: Field, path: KeyPath) -> Field | None:
    """The field at a path within a mapping of names to sections, if the model of its values has it."""
    values = [get_args(option)[1] for option in _options(field.info.annotation) if get_origin(option) is dict]
    model = section_model(values[0]) if len(values) == 1 else None
    if model is None:
        return None
    entry = Field(path=(*field.path, path[0]), owner=field.owner, name=field.name, info=FieldInfo.from_annotation(model))
    return find_field(model, path[1:], prefix=entry.path) if path[1:] else entry


def all_fields(model: Model, *, prefix: KeyPath = (), depth: int = 8) -> Iterator[Field]:
    """Every field of a model and of the sections within it, in the order of declaration."""
    for field in (_field(model, name, prefix) for name in model.model_fields):
        yield field
        if field.model is not None and depth > 0:  # a model may hold itself
            yield from all_fields(field.model, prefix=field.path, depth=depth - 1)


def declaring_model(model: Model, name: str) -> Model:
    """The class that declares a field, which may be a base class of the model."""
    return next((base for base in model.__mro__ if name in vars(base).get("__annotations__", {})), model)


def plain_default(info: FieldInfo) -> Any:
    """The default of a field as plain data; `NO_DEFAULT` if the field is required."""
    if info.is_required():
        return NO_DEFAULT
    return to_jsonable_python(info.get_default(call_default_factory=True, validated_data={}))


def section_model(annotation: Any) -> Model | None:
    """The model of a section, including optional ones; None for a value or a choice between models."""
    models = [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]
    return models[0] if len(models) == 1 else None


def holds_free_keys(annotation: Any) -> bool:
    """Whether the value may be a mapping with arbitrary keys."""
    return any(option is Any or (get_origin(option) or option) in (dict, Mapping) for option in _options(annotation))


def allows_bool(annotation: Any) -> bool:
    """Whether true and false are valid values themselves, not accidental numbers."""
    return any(
        option in (bool, Any, object) or (get_origin(option) is Literal and any(isinstance(v, bool) for v in get_args(option)))
        for option in _options(annotation)
    )


def choices(annotation: Any) -> list[Any]:
    """The values that a choice (`Literal` or an enum) allows."""
    options: list[Any] = []
    for option in _options(annotation):
        if get_origin(option) is Literal:
            options.extend(get_args(option))
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            options.extend(member.value for member in option)
    return options


def inner_annotation(annotation: Any, path: KeyPath) -> Any:
    """The type of the items of a list or of the values of a mapping, with one level per component of the path."""
    for part in path:
        inner = Any
        for option in _options(annotation):
            origin, arguments = get_origin(option), get_args(option)
            if isinstance(part, int) and origin in _LISTS and arguments:
                inner = arguments[0]
            elif isinstance(part, str) and origin in (dict, Mapping) and len(arguments) == 2:
                inner = arguments[1]
        annotation = inner
    return annotation


def type_name(annotation: Any) -> str:
    """A type in Python notation without modules: `float | None`."""
    if annotation is None or annotation is type(None):
        return "None"
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(option) for option in get_args(annotation))
    if origin is Literal:
        return f"Literal[{', '.join(repr(value) for value in get_args(annotation))}]"
    if hasattr(annotation, "__metadata__"):
        return type_name(get_args(annotation)[0])
    if origin is not None:
        return f"{type_name(origin)}[{', '.join(type_name(item) for item in get_args(annotation))}]"
    return getattr(annotation, "__name__", str(annotation))


def describe(info: FieldInfo) -> str:
    """The allowed values of a field, for a sentence."""
    return describe_type(info.annotation, [item for item in info.metadata if type(item) in _BOUNDS])


def describe_type(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """The values that a type allows, within bounds of `annotated_types`, for a sentence."""
    texts = []
    for option in _options(annotation):
        text = _describe_one(option)
        if option in (int, float, str) or get_origin(option) in (list, dict, tuple):
            text += _bounds(bounds, of=option)
        if text not in texts:
            texts.append(text)
    # null comes last
    texts.sort(key=lambda text: text == "null")
    return (", or " if any("," in text for text in texts[:-1]) else " or ").join(texts)


_BOUNDS: dict[type, str] = {
    Ge: "{0} or more",
    Gt: "more than {0}",
    Le: "at most {0}",
    Lt: "less than {0}",
    MultipleOf: "a multiple of {0}",
    MinLen: "{0} or more {unit}",
    MaxLen: "at most {0} {unit}",
}
_LISTS = (list, tuple, set, frozenset)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    pathlib.Path: "a path",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
    Any: "anything",
}


def _describe_one(option: Any) -> str:
    if option in _WORDS:
        return _WORDS[option]
    allowed = choices(option)
    if allowed:
        return " or ".join(show(value) for value in allowed)
    origin, arguments = get_origin(option), get_args(option)
    if origin in _LISTS and arguments:
        return f"a list of {describe_type(arguments[0])}"
    if origin in (dict, Mapping) and len(arguments) == 2:
        return "a mapping" if arguments[1] is Any else f"a mapping from names to {describe_type(arguments[1])}"
    if isinstance(option, type) and issubclass(option, BaseModel):
        return "a section" + (f" of {', '.join(option.model_fields)}" if option.model_fields else "")
    return type_name(option)


def _bounds(bounds: Sequence[Any], *, of: Any) -> str:
    sized = get_origin(of) is not None or of is str
    unit = "characters" if of is str else "items"
    words = {kind: text for kind, text in _BOUNDS.items() if sized == (kind in (MinLen, MaxLen))}
    limits = [words[type(bound)].format(*astuple(bound), unit=unit) for bound in bounds if type(bound) in words]
    return "".join(f", {limit}" for limit in limits)


def _options(annotation: Any) -> list[Any]:
    """The alternatives of a type, without `Annotated`."""
    if hasattr(annotation, "__metadata__"):
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for option in get_args(annotation) for inner in _options(option)]
    return [type(None) if annotation is None else annotation]
