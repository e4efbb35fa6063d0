"""Conversations as data holds them, in OpenAI's form, checked, each content a text; knows no dataset and no chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.data.formatting import format_value
from rl_core.data.tool_calls import read_calls
from rl_core.errors import DataError

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
_EMPTY_IS_ABSENT = ("tool_calls", "function_call", "tool_call_id")


def read_messages(value: Any, what: str, *, role: str) -> Messages:
    """The messages that a field holds; a text is one message.

    A content may be a list of parts, `{"type": "text", "text": ...}` each, which are joined; that of a message which only calls
    tools is empty. Keys that are null are left out. Whether results answer calls is for the whole conversation to say
    (`tool_calls.check_tool_use`).

    Args:
        value: The field.
        what: What errors call it.
        role: Who says a text.

    Raises:
        DataError: It is neither a text nor messages of text, a role is unknown, or a call is none.
    """
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, what)}]
    if not isinstance(value, list):
        raise DataError(f"{what} is neither a text nor a list of messages")
    if not value:
        raise DataError(f"{what} is an empty list: expected messages")
    return [_message(message, f"message {number} of {what}") for number, message in enumerate(value)]


def without_answer(messages: Messages) -> Messages:
    """The conversation up to the question: what the assistant says last is left out."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    return asked


def with_system_prompt(messages: Messages, system_prompt: str | None) -> Messages:
    """The messages after the configured system prompt, unless there is none or they start with a system message."""
    if system_prompt is None or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def kind_of(messages: Messages, tools: Any) -> frozenset[str]:
    """What a chat template may take of one conversation and not of another: the roles, and what there is of tools."""
    calls = {"calls" if len(message["tool_calls"]) > 1 else "a call" for message in messages if message.get("tool_calls")}
    return frozenset({message["role"] for message in messages} | calls | ({"an offer"} if tools else set()))


def _message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is no {{role, content}}: found {format_value(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    for key in _EMPTY_IS_ABSENT:
        if not given.get(key, True):
            del given[key]
    if given.get("role") == "function" or "function_call" in given:
        raise DataError(
            f"{what} calls a function in the old form (function_call, role 'function'): write `tool_calls` in the assistant's "
            "message, and the result as a message of the role 'tool'"
        )
    if "tool_calls" in given:
        given["tool_calls"] = read_calls(given["tool_calls"], what)
        given.setdefault("content", "")
    if not {"role", "content"} <= given.keys():
        raise DataError(f"{what} is no {{role, content}}: found {format_value(message)}")
    _check_role(given, what)
    if given.get("weight") not in (None, 0, 1):
        raise DataError(f"{what} has the weight {given['weight']!r}: expected 1 (trained) or 0 (not trained)")
    return {**given, "content": _text(given["content"], what)}


def _check_role(given: Mapping[str, Any], what: str) -> None:
    if given["role"] not in ROLES:
        raise DataError(f"{what} has the role {given['role']!r}: expected one of {', '.join(ROLES)}")
    for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if key in given and given["role"] != role:
            raise DataError(f"{what} has {key} and the role {given['role']!r}: only a message of the role {role!r} has them")


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return _whole(content, what)
    if not isinstance(content, list):
        raise DataError(f"{what} has the content {format_value(content)}: expected a text or a list of text parts")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(
                f"{what} has a part of the type {kind!r}: only text can be trained on. Leave the part out, or drop the row"
            )
        parts.append(part["text"])
    return _whole("".join(parts), what)


def _whole(text: str, what: str) -> str:
    """The text, if it is one: JSON can write half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half of a character, {text[error.start]!r}, at place {error.start}: it was cut there, or written "
            "wrongly. Mend the text, or drop the row"
        ) from error
    return text
