"""Reads and checks conversations in OpenAI's format, with tools, calls and results. Independent of datasets and templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import DataError, format_value
from rl_core.interfaces.records import text_of
from rl_train.data.image_sources import image_parts, with_image_parts
from rl_train.data.rows import read_json

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool", "environment")
_EMPTY_IS_ABSENT = ("tool_calls", "function_call", "tool_call_id")


def read_messages(value: Any, what: str, *, role: str) -> Messages:
    """The messages of a field; a text is one message.

    The content may be a list of parts: texts, `{"type": "text", "text": ...}`, which are joined if no part is an image; and
    images, in which case it stays a list (`image_sources.with_image_parts`). It is empty in messages that only call tools.
    Null keys are removed. `check_tool_use` checks that tool results match calls.

    Args:
        value: The field.
        what: Name of the field in error messages.
        role: Role of a text.

    Raises:
        DataError: It is neither a text nor messages of text and images, a role is unknown, or a tool call is invalid.
    """
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, what)}]
    if not isinstance(value, list):
        raise DataError(f"{what} is neither a text nor a list of messages")
    if not value:
        raise DataError(f"{what} is an empty list: expected messages")
    return [_message(message, f"message {number} of {what}") for number, message in enumerate(value)]


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer to the others: one of the assistant with `prefix: true`."""
    return bool(messages) and messages[-1]["role"] == "assistant" and bool(messages[-1].get("prefix"))


def without_answer(messages: Messages) -> Messages:
    """The conversation without the answer that it begins, or else without the final messages of the assistant."""
    if is_begun(messages):
        return messages[:-1]
    prompt = list(messages)
    while prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    return prompt


def begun_answer(messages: Messages) -> str:
    """The beginning of the answer, with which the conversation ends; empty if it has none."""
    return str(messages[-1]["content"]) if is_begun(messages) else ""


def with_system_prompt(messages: Messages, system_prompt: str | None) -> Messages:
    """The messages after the configured system prompt, unless there is none or they start with a system message."""
    if system_prompt is None or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def kind_of(messages: Messages, tools: Any) -> frozenset[str]:
    """Features of a conversation that a chat template may not support: its roles, tool use and images."""
    calls = {"calls" if len(message["tool_calls"]) > 1 else "a call" for message in messages if message.get("tool_calls")}
    images = {"an image"} if image_parts(messages) else set()
    return frozenset({message["role"] for message in messages} | calls | images | ({"an offer"} if tools else set()))


def _message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is not {{role, content}}: found {format_value(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    for key in _EMPTY_IS_ABSENT:
        if not given.get(key, True):
            del given[key]
    if given.get("role") == "function" or "function_call" in given:
        raise DataError(
            f"{what} calls a function in the old format (function_call, role 'function'): use `tool_calls` in the assistant's "
            "message, and a message with the role 'tool' for the result"
        )
    if "tool_calls" in given:
        given["tool_calls"] = read_calls(given["tool_calls"], what)
        given.setdefault("content", "")
    if not {"role", "content"} <= given.keys():
        raise DataError(f"{what} is not {{role, content}}: found {format_value(message)}")
    _check_role(given, what)
    if given.get("weight") not in (None, 0, 1):
        raise DataError(f"{what} has the weight {given['weight']!r}: expected 1 (trained) or 0 (not trained)")
    return {**given, "content": read_content(given["content"], given["role"], what)}


def read_content(content: Any, role: str, what: str) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or parts if it has images.

    Raises:
        DataError: It is neither, or an answer with an image.
    """
    parts = with_image_parts(content, what)
    if parts is None:
        return _text(content, what)
    if role == "assistant":
        raise DataError(f"{what} has an image and the role 'assistant': models read images and do not write them. Remove it")
    for part in parts:
        paired_text(part.get("text", ""), what)
    return parts


def _check_role(given: Mapping[str, Any], what: str) -> None:
    if given["role"] not in ROLES:
        raise DataError(f"{what} has the role {given['role']!r}: expected one of {', '.join(ROLES)}")
    for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("prefix", "assistant")):
        if given.get(key) and given["role"] != role:
            raise DataError(f"{what} has {key} and the role {given['role']!r}: {key} is only allowed with the role {role!r}")


def _text(content: Any, what: str) -> str:
    return paired_text(text_of(content, what), what)


def paired_text(text: str, what: str) -> str:
    """The text, checked for unpaired surrogates, which JSON can contain but tokenizers cannot read.

    Raises:
        DataError: It has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has an unpaired surrogate, {text[error.start]!r}, at index {error.start}: the text was cut inside a "
            "character, or is corrupt. Fix the text or remove the row"
        ) from error
    return text


Tool = dict[str, Any]
Call = dict[str, Any]

_SPEC = "{type: function, function: {name, description, parameters}}"
_CALL = "{id, type: function, function: {name, arguments}}"


def read_tools(value: Any, what: str) -> list[Tool]:
    """The functions offered by a field, as `{type: function, function: {name, ...}}`; empty for null or an empty list.

    The list, its functions and their parameters may be JSON text; a function without the outer object gets it.

    Args:
        value: The field.
        what: Its name in errors.

    Raises:
        DataError: It is not a list of functions.
    """
    listed = from_text(value, what)
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise DataError(
            f"{what} is {format_value(value)}: expected a list of functions, {_SPEC} each, or its JSON. If the field "
            "contains something else, choose another `tools_key` (null for none)"
        )
    return [_tool(each, f"tool {number} of {what}") for number, each in enumerate(listed)]


def tools_of(row: Mapping[str, Any], key: str | None, *, is_named: bool) -> list[Tool]:
    """The functions offered by a row.

    Args:
        row: Its fields.
        key: The field that contains them, if any.
        is_named: Whether the config sets the field explicitly, so that every row must have it.

    Raises:
        DataError: An explicitly set field is missing, or the field is invalid.
    """
    if key is None:
        return []
    if is_named and key not in row:
        raise DataError(f"the field {key!r} (`tools_key`) is missing: the row has {sorted(row)}")
    return read_tools(row.get(key), f"the field {key!r} (`tools_key`)")


def read_calls(value: Any, what: str) -> list[Call]:
    """The calls of a message, as `{id, type: function, function: {name, arguments}}`; the id is optional.

    Arguments become an object, whether they were an object or JSON text; an empty one if they are null or an empty text.

    Args:
        value: The message's `tool_calls`.
        what: The message's name in errors.

    Raises:
        DataError: It is not a list of calls, or arguments are not a JSON object.
    """
    if not isinstance(value, list):
        raise DataError(f"{what} has the tool_calls {format_value(value)}: expected a list of {_CALL}")
    calls = [_call(each, f"call {number} of {what}") for number, each in enumerate(value)]
    ids = [call["id"] for call in calls if "id" in call]
    if len(set(ids)) < len(ids):
        raise DataError(f"{what} has several calls with the same id, {ids}, so results cannot be matched to calls")
    return calls


def check_tool_use(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> None:
    """Check that the calls and results of a whole conversation match.

    A result belongs to a call of the preceding assistant message, with only other results between: the call with its
    `tool_call_id`, else one with its `name`, else the next. Calls may have no result.

    Args:
        messages: From `read_messages`.
        tools: The offered functions; empty if the row does not list any.

    Raises:
        DataError: A result does not match any call, or a called function is not offered.
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
                    f"message {number} of the conversation calls {name!r}, but the row offers {', '.join(offered)}: the model "
                    "would learn to call functions it was not shown. Offer the function, or drop the row"
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
    is_empty = "arguments" in function and function["arguments"] in (None, "")  # as some servers return them
    arguments = from_text(function.get("arguments"), f"`arguments` of {what}") if not is_empty else {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"`arguments` of {what} is {format_value(function.get('arguments'))}: expected a JSON object or its text "
            "({} for none)"
        )
    read: Call = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": call["id"], **read} if call.get("id") else read


def _without_answered(waiting: list[Call], result: Mapping[str, Any], what: str) -> list[Call]:
    """The calls that are still without a result."""
    if not waiting:
        raise DataError(
            f"{what} is a tool result but does not match any tool call of the preceding assistant message, or that message is "
            "not directly before the results"
        )
    wanted, name = result.get("tool_call_id"), result.get("name")
    if wanted is not None:
        matching = [call for call in waiting if call.get("id") == wanted]
        pending = [call.get("id") for call in waiting]
    else:
        matching = [call for call in waiting if name in (None, call["function"]["name"])]
        pending = [call["function"]["name"] for call in waiting]
    if not matching:
        by = f"tool_call_id {wanted!r}" if wanted is not None else f"name {name!r}"
        raise DataError(
            f"{what} has the {by}, which does not match a pending call. Pending calls: {pending}. Use the "
            "id of the call, or omit the id if calls have none"
        )
    return [call for call in waiting if call is not matching[0]]


def from_text(value: Any, what: str) -> Any:
    """A value that may be given as JSON text.

    Args:
        value: The value, or the text.
        what: Its name in errors.

    Raises:
        DataError: The text is not valid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except DataError as error:
        raise DataError(f"{what} is the text {format_value(value)}: {error}") from error
