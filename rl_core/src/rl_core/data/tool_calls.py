"""Tools in data, in OpenAI's form: what a row offers, what a message calls, what answers a call; knows no chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.data.formatting import format_value
from rl_core.data.strict_json import read_json
from rl_core.errors import DataError

Tool = dict[str, Any]
Call = dict[str, Any]

_SPEC = "{type: function, function: {name, description, parameters}}"
_CALL = "{id, type: function, function: {name, arguments}}"


def read_tools(value: Any, what: str) -> list[Tool]:
    """The functions that a field offers, `{type: function, function: {name, ...}}` each; none for null or an empty list.

    The list, each of its functions and the parameters of one may be texts of JSON; a function without its wrapping gets it.

    Args:
        value: The field.
        what: What errors call it.

    Raises:
        DataError: It is no list of functions.
    """
    listed = from_text(value, what)
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise DataError(
            f"{what} is {format_value(value)}: expected a list of functions, {_SPEC} each, or the JSON of one. If the field "
            "is something else, name another `tools_key` (null for none)"
        )
    return [_tool(each, f"tool {number} of {what}") for number, each in enumerate(listed)]


def tools_of(row: Mapping[str, Any], key: str | None, *, is_named: bool) -> list[Tool]:
    """The functions that a row offers.

    Args:
        row: Its fields.
        key: The field that holds them; None for no field.
        is_named: Whether the config names the field, so that every row has to have it.

    Raises:
        DataError: The field is absent where it is named, or holds something else.
    """
    if key is None:
        return []
    if is_named and key not in row:
        raise DataError(f"the field {key!r} (`tools_key`) is absent: the row has {sorted(row)}")
    return read_tools(row.get(key), f"the field {key!r} (`tools_key`)")


def read_calls(value: Any, what: str) -> list[Call]:
    """The calls of a message, `{id, type: function, function: {name, arguments}}` each; the id where there is one.

    Arguments are an object, whether they were written as one or as a text of JSON.

    Args:
        value: The message's `tool_calls`.
        what: What errors call the message.

    Raises:
        DataError: It is no list of calls, or arguments are no JSON object.
    """
    if not isinstance(value, list):
        raise DataError(f"{what} has the tool_calls {format_value(value)}: expected a list of {_CALL}")
    calls = [_call(each, f"call {number} of {what}") for number, each in enumerate(value)]
    ids = [call["id"] for call in calls if "id" in call]
    if len(set(ids)) < len(ids):
        raise DataError(f"{what} has several calls of one id, {ids}: a result could not say which of them it answers")
    return calls


def check_tool_use(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> None:
    """Hold a whole conversation to what makes sense of its calls.

    A result answers a call of the assistant's message before it, with nothing but results between: the one of its
    `tool_call_id`, else one of its `name`, else the next. Calls may go without a result.

    Args:
        messages: From `read_messages`.
        tools: What the row offers; none where it does not say.

    Raises:
        DataError: A result answers nothing, or a call is of a function that is not offered.
    """
    offered = [tool["function"]["name"] for tool in tools]
    waiting: list[Call] = []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            waiting = _without_answered(waiting, message, f"message {number} of the conversation")
            continue
        waiting = list(message.get("tool_calls", ()))
        for name in (call["function"]["name"] for call in waiting):
            if offered and name not in offered:
                raise DataError(
                    f"message {number} of the conversation calls {name!r}, and the row offers {', '.join(offered)}: a model "
                    "would learn to call what it was not shown. Offer the function, or drop the row"
                )


def _tool(tool: Any, what: str) -> Tool:
    tool = from_text(tool, what)
    if not isinstance(tool, Mapping):
        raise DataError(f"{what} is {format_value(tool)}: expected {_SPEC}")
    if tool.get("type", "function") != "function":
        raise DataError(f"{what} is of the type {tool['type']!r}: only functions can be offered")
    is_bare = "function" not in tool
    spec = {key: value for key, value in tool.items() if key != "type"} if is_bare else tool["function"]
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str) or not spec["name"]:
        raise DataError(f"{what} is {format_value(tool)}, which has no name: expected {_SPEC}")
    spec = dict(spec)
    if "parameters" in spec:
        spec["parameters"] = from_text(spec["parameters"], f"`parameters` of {what}")
        if not isinstance(spec["parameters"], Mapping):
            raise DataError(f"`parameters` of {what} is {format_value(spec['parameters'])}: expected a JSON schema, an object")
    return {"type": "function", **({} if is_bare else tool), "function": spec}


def _call(call: Any, what: str) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{what} is {format_value(call)}, which names no function: expected {_CALL}")
    if call.get("type", "function") != "function":
        raise DataError(f"{what} is of the type {call['type']!r}: only functions can be called")
    arguments = from_text(function.get("arguments"), f"`arguments` of {what}")
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"`arguments` of {what} is {format_value(function.get('arguments'))}: expected a JSON object or its text "
            "({} for none)"
        )
    read: Call = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": call["id"], **read} if call.get("id") else read


def _without_answered(waiting: list[Call], result: Mapping[str, Any], what: str) -> list[Call]:
    """The calls that still wait after a result."""
    if not waiting:
        raise DataError(
            f"{what} is the result of a tool and answers no call: before it stands a message of the assistant with one more "
            "of tool_calls, with nothing but results between"
        )
    wanted, name = result.get("tool_call_id"), result.get("name")
    if wanted is not None:
        matching = [call for call in waiting if call.get("id") == wanted]
        found = [call.get("id") for call in waiting]
    else:
        matching = [call for call in waiting if name in (None, call["function"]["name"])]
        found = [call["function"]["name"] for call in waiting]
    if not matching:
        by = f"tool_call_id {wanted!r}" if wanted is not None else f"name {name!r}"
        raise DataError(
            f"{what} has the {by}, which answers nothing: the calls that wait for an answer are {found}. Give the result the "
            "id of its call, or leave the id out where the calls have none"
        )
    return [call for call in waiting if call is not matching[0]]


def from_text(value: Any, what: str) -> Any:
    """A value that may be written as its JSON.

    Args:
        value: The value, or the text.
        what: What errors call it.

    Raises:
        DataError: It is a text and no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except DataError as error:
        raise DataError(f"{what} is the text {format_value(value)}: {error}") from error
