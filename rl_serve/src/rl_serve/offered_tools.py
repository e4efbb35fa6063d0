"""The functions of a request, and whether the model must call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_core.errors import DataError
from rl_serve.errors import ApiError
from rl_serve.structured_outputs import refuse_large_schema
from rl_train.data.tool_calls import read_tools
from rl_train.tools.parsers import MistralParser, ParsedMessage, SampledMessage, ToolCallParser

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, kw_only=True)
class OfferedTools:
    """Functions that the model may or must call; false if there are none."""

    functions: Sequence[Any] = field(default_factory=tuple)
    """The functions that the chat template shows to the model."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of a message that must call some of them; None if the model chooses."""

    def __bool__(self) -> bool:
        return bool(self.functions)


NO_TOOLS = OfferedTools()


def requires_calls(tool_choice: Any) -> bool:
    """Whether `tool_choice` leaves no choice to the model: it is `required`, or names a function."""
    return tool_choice not in (None, "auto", "none")


def read_offered_tools(
    tools: Any, tool_choice: Any, parallel_tool_calls: bool | None, *, can_require: bool = False
) -> OfferedTools:
    """The functions that the model is shown; none with `tool_choice: "none"`.

    Args:
        tools: field of the request.
        tool_choice: field of the request.
        parallel_tool_calls: field of the request.
        can_require: whether `tool_choice` may be `required` or name a function.

    Raises:
        ApiError: a function is invalid, or a choice would require constrained decoding, which the engine does not have.
    """
    must_call = requires_calls(tool_choice) and can_require
    try:
        read = read_tools(tools, "tools") if tools is None or isinstance(tools, list) else _refuse_text(tools)
    except DataError as error:
        raise ApiError(400, f"{error}.", param="tools") from error
    if len(read) > _MAX_TOOLS:
        raise ApiError(400, f"tools has {len(read)} functions: at most {_MAX_TOOLS} are allowed.", param="tools")
    for number, tool in enumerate(read):
        _check_function(tool["function"], f"tools[{number}].function", may_be_strict=must_call)
    if must_call:
        return OfferedTools(functions=read, schema=_schema_of_calls(read, tool_choice, parallel_tool_calls))
    if requires_calls(tool_choice):
        raise ApiError(
            400,
            'tool_choice must be "auto" or "none": other choices need constrained decoding, which is not supported.',
            param="tool_choice",
            code="unsupported_value",
        )
    if read and tool_choice != "none" and parallel_tool_calls is False:
        raise ApiError(
            400,
            "parallel_tool_calls must be true: one call per message needs constrained decoding, which is not supported.",
            param="parallel_tool_calls",
            code="unsupported_value",
        )
    return NO_TOOLS if tool_choice == "none" else OfferedTools(functions=read)


class RequiredCallsParser(ToolCallParser):
    """Reads the message of a model that had to call functions: a JSON list of calls, in no format of a chat template."""

    name = "required_calls"

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """The calls."""
        return MistralParser().parse(replace(message, text=f"[TOOL_CALLS]{message.text}"))  # the same list after a mark


def _schema_of_calls(tools: Sequence[dict[str, Any]], tool_choice: Any, parallel_tool_calls: bool | None) -> dict[str, Any]:
    """The JSON schema of a list of at least one call; of exactly one if `tool_choice` names a function."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    named = [name for name in functions if tool_choice == {"type": "function", "function": {"name": name}}]
    if not functions or not (named or tool_choice == "required"):
        raise ApiError(
            400,
            'tool_choice must be "auto", "none", "required", or {"type": "function", "function": {"name": NAME}} with the name '
            "of a function; the last two require tools.",
            param="tool_choice",
        )
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for name in named or functions:
        parameters = dict(functions[name].get("parameters") or {"type": "object"})
        for keyword in _DEFINITIONS:  # references begin at the root of the schema
            for key, definition in (parameters.pop(keyword, None) or {}).items():
                if definitions.setdefault(keyword, {}).setdefault(key, definition) != definition:
                    raise ApiError(400, f"Two functions have different {keyword} named {key!r}. Rename one.", param="tools")
        properties = {"name": {"const": name}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    limit = {"maxItems": 1} if named or parallel_tool_calls is False else {}
    schema = {**definitions, "type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}
    return refuse_large_schema(schema, param="tools")


def _check_function(function: Mapping[str, Any], where: str, *, may_be_strict: bool) -> None:
    if not _NAME.fullmatch(function["name"]):
        raise ApiError(400, f"{where}.name must have 1 to 64 letters, digits, points, dashes and underscores.", param="tools")
    if function.get("strict") and not may_be_strict:
        raise ApiError(
            400,
            f"{where}.strict needs constrained decoding, which is not supported. Remove it.",
            param="tools",
            code="unsupported_value",
        )


def _refuse_text(tools: Any) -> list[Any]:
    raise DataError(f"tools is {type(tools).__name__}: expected a list of functions")
