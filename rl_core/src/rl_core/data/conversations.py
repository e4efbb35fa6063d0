"""Conversations as data holds them, in OpenAI's form, checked and brought to plain {role, content}; knows no dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.errors import DataError

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant")
_LONGEST_SHOWN = 120
_CALLS = ("tool_calls", "function_call", "tool_call_id")


def read_messages(value: Any, what: str, *, role: str) -> Messages:
    """The messages that a field holds; a text is one message.

    A content may be a list of parts, `{"type": "text", "text": ...}` each, which are joined. Keys that are null are left out:
    a table has a column for every key that any of its messages has.

    Args:
        value: The field.
        what: What errors call it.
        role: Who says a text.

    Raises:
        DataError: It is neither a text nor messages of text, a role is unknown, or a tool is called.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
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


def shown(value: Any) -> str:
    """A value in an error: whole, unless it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{what} is no {{role, content}}: found {shown(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("role") in ("tool", "function") or any(given.get(key) for key in _CALLS):
        raise DataError(
            f"{what} calls a tool or answers for one: conversations with tools cannot be trained on from a dataset, since most "
            "chat templates leave such messages out without a word. Drop the row, or write the call as text"
        )
    if not {"role", "content"} <= given.keys():
        raise DataError(f"{what} is no {{role, content}}: found {shown(message)}")
    if given["role"] not in ROLES:
        raise DataError(f"{what} has the role {given['role']!r}: expected one of {', '.join(ROLES)}")
    if given.get("weight") not in (None, 0, 1):
        raise DataError(f"{what} has the weight {given['weight']!r}: expected 1 (trained) or 0 (not trained)")
    return {**{key: value for key, value in given.items() if key not in _CALLS}, "content": _text(given["content"], what)}


def _text(content: Any, what: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{what} has the content {shown(content)}: expected a text or a list of text parts")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{what} has a part of the type {kind!r}: only text can be trained on")
        parts.append(part["text"])
    return "".join(parts)
