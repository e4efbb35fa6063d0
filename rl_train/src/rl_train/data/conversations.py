"""Reads and checks conversations in OpenAI's format. Independent of datasets and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import DataError, format_value
from rl_core.testing.outputs.message_text import text_of
from rl_train.data.tool_calls import read_calls

Messages = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool", "environment")
_EMPTY_IS_ABSENT = ("tool_calls", "function_call", "tool_call_id")


def read_messages(value: Any, what: str, *, role: str) -> Messages:
    """The messages of a field; a text is one message.

    The content may be a list of parts, `{"type": "text", "text": ...}` each, which are joined; it is empty in messages that
    only call tools. Null keys are removed. `tool_calls.check_tool_use` checks that tool results match calls.

    Args:
        value: The field.
        what: Name of the field in error messages.
        role: Role of a text.

    Raises:
        DataError: It is neither a text nor messages of text, a role is unknown, or a tool call is invalid.
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
    """Features of a conversation that a chat template may not support: its roles and tool use."""
    calls = {"calls" if len(message["tool_calls"]) > 1 else "a call" for message in messages if message.get("tool_calls")}
    return frozenset({message["role"] for message in messages} | calls | ({"an offer"} if tools else set()))


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
    return {**given, "content": _text(given["content"], what)}


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
