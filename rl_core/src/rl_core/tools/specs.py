"""Python functions as tools: the JSON schema comes from signature and docstring, and arguments are validated by pydantic."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from typing_extensions import TypedDict

from rl_core.errors import ConfigError
from rl_core.interfaces.records import ToolSpec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes):\s*$")
_PARAMETER = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class ToolArgumentError(ValueError):
    """The arguments of a call do not match the tool's parameters; the message says what is wrong, for the model."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model can call: plain or async, what the model is shown, and an adapter that converts arguments."""

    spec: ToolSpec
    function: Callable[..., Any]
    adapter: TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A function as a tool.

        Its name and docstring are the tool's name and description, and each line of the section `Args` describes a parameter.
        Every parameter needs a type hint: `str`, `int`, `float`, `bool`, lists and dicts of these, `Optional`, `Literal`,
        enums, dataclasses and pydantic models. Parameters with a default are optional.

        Raises:
            ConfigError: A parameter has no type hint or a type without a JSON schema, or the function takes `*args`,
                `**kwargs` or positional-only parameters.
        """
        name = getattr(function, "__name__", "")
        if not callable(function) or not _NAME.fullmatch(name):
            raise ConfigError(f"{function!r} cannot be a tool: expected a function whose name has letters, digits, `_` or `-`.")
        description, described = read_docstring(inspect.getdoc(function) or "")
        adapter = TypeAdapter(_arguments_type(function, described))
        try:
            schema = adapter.json_schema()
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"The tool {name!r} has a parameter without a JSON schema: {reason}") from error
        parameters = readable_schema(schema)
        spec: ToolSpec = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        return cls(spec=spec, function=function, adapter=adapter)

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return self.spec["function"]["name"]

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate and convert the arguments of a call.

        Raises:
            ToolArgumentError: An argument is missing, unknown, or cannot be converted to its parameter's type.
        """
        try:
            return self.adapter.validate_python(dict(arguments))
        except ValidationError as error:
            errors = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
            raise ToolArgumentError("; ".join(errors)) from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description of a docstring in Google style, without its sections, and the descriptions in the section `Args`."""
    section, description = "", []
    described: dict[str, str] = {}
    last, indent = "", 0
    for line in text.splitlines():
        if header := _SECTION.match(line):
            section, last = header.group(1), ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            parameter = _PARAMETER.match(line.strip())
            if parameter and (not last or depth <= indent):
                last, indent = parameter.group(1), depth
                described[last] = parameter.group(2)
            elif last:
                described[last] = f"{described[last]} {line.strip()}".strip()
    return "\n".join(description).strip(), described


def _arguments_type(function: Callable[..., Any], described: Mapping[str, str]) -> Any:
    """A TypedDict of the function's parameters."""
    name = function.__name__
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"The type hints of the tool {name!r} cannot be read: {error}.") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"The tool {name!r} has the parameter {str(parameter)!r}, but models pass arguments by name: name it."
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"The parameter {parameter.name!r} of the tool {name!r} has no type hint, so its schema is unknown: add one."
            )
        extra = {} if parameter.default in (parameter.empty, None) else {"default": parameter.default}
        schema_extra = extra if isinstance(extra.get("default"), str | int | float | bool) else None
        field = Field(description=described.get(parameter.name), json_schema_extra=schema_extra)
        hint = getitem(Annotated, (hints[parameter.name], field))
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
        _check_type(hints[parameter.name], parameter.name, name)
    arguments_type = TypedDict("Arguments", fields)  # type: ignore[misc]
    arguments_type.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return arguments_type


def _check_type(hint: Any, parameter: str, tool: str) -> None:
    try:
        TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(
            f"The parameter {parameter!r} of the tool {tool!r} has the type {hint!r}, which JSON schema cannot describe. Use "
            "str, int, float, bool, lists and dicts of these, Literal, an enum, a dataclass or a pydantic model."
        ) from error


def readable_schema(schema: Mapping[str, Any]) -> Any:
    """A JSON schema for prompts: references are inlined, titles and `additionalProperties: false` removed.

    Raises:
        ConfigError: A type contains itself.
    """
    return _readable(schema, schema.get("$defs", {}), ())


def _readable(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], *, is_named: bool = False) -> Any:
    """The schema without references, because models and chat templates read it as it is, and without what only makes it longer.

    `inside` are the definitions that contain it. With `is_named`, its keys are names of parameters.
    """
    if isinstance(schema, list):
        return [_readable(each, definitions, inside) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        name = reference.rpartition("/")[2]
        if name in inside:
            raise ConfigError(f"The type {name!r} of a tool's parameter contains itself: use a type that does not.")
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _readable({**definitions[name], **others}, definitions, (*inside, name))
    return {
        key: _readable(value, definitions, inside, is_named=key == "properties" and not is_named)
        for key, value in schema.items()
        if is_named or not _only_lengthens(key, value)
    }


def _only_lengthens(key: str, value: Any) -> bool:
    """Whether it is a definition, which is inlined, a title by pydantic, or `additionalProperties: false`."""
    return key == "$defs" or (key == "title" and isinstance(value, str)) or (key == "additionalProperties" and value is False)
