"""Parses the tool calls in a model's message, in the formats of current chat templates."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from rl_core.errors import format_value
from rl_core.interfaces.messages import ToolCall, ToolSpec


@dataclass(frozen=True, kw_only=True)
class SampledMessage:
    """A sampled message for a parser.

    Attributes:
        text: Its text with the special tokens that `decode_answers` shows.
        token_ids: Its tokens as sampled.
        prompt_ids: The tokens before it.
        tools: The tools offered to the model.
    """

    text: str
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    tools: Sequence[ToolSpec] = ()


@dataclass(frozen=True, kw_only=True)
class ParsedMessage:
    """A message without the text of its calls, and the calls.

    Attributes:
        content: The text, without that of the calls.
        calls: The calls in order; one that cannot be read has an `error`. They have an id only if the model wrote one.
    """

    content: str
    calls: list[ToolCall]


class ToolCallParser(ABC):
    """Separates the tool calls of a message from its text. Thinking in `<think>` tags is text and is not searched."""

    name: ClassVar[str]

    @abstractmethod
    def parse(self, message: SampledMessage) -> ParsedMessage:
        """The message's text and calls; the whole text if it calls nothing."""

    def text_before_calls(self, text: str) -> str:
        """The beginning of an unfinished message that is content whatever follows, so that a server can stream it.

        `parse` may remove whitespace at the beginning of the text. By default, nothing is sent before the message is complete.
        """
        return ""


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes and Qwen."""

    name = "hermes"
    _CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)

    def text_before_calls(self, text: str) -> str:
        """The text before the first `<tool_call>`, also before an end that may be the beginning of that tag."""
        return _before_mark(text, "<tool_call>")

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """Read the call in each `<tool_call>` tag; the last call may lack its closing tag."""
        thinking, text = split_thinking(message.text)
        calls = [_call_in(found.group(1)) for found in self._CALL.finditer(text)]
        return ParsedMessage(content=thinking + (self._CALL.sub("", text).strip() if calls else text), calls=calls)


class Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` as the whole message, or after `<|python_tag|>`; several are separated by `;`."""

    name = "llama3"
    _MARK = "<|python_tag|>"
    _OBJECT = re.compile(r'\s*\{\s*"(?:name|type|parameters|arguments|function)"\s*:')

    def text_before_calls(self, text: str) -> str:
        """The text before `<|python_tag|>`; nothing if the message begins with a brace, because it may be a call."""
        thinking, said = split_thinking(text)
        return thinking if said.lstrip().startswith("{") else _before_mark(text, self._MARK)

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """Read the calls after the mark, or a whole message that is a call; other JSON without the mark is an answer."""
        thinking, text = split_thinking(message.text)
        before, mark, after = text.partition(self._MARK)
        if not mark and not self._OBJECT.match(text):
            return ParsedMessage(content=message.text, calls=[])
        values = _values((after if mark else before).strip())
        calls = [read_call(value) if error is None else invalid_call(error) for value, error in values]
        return ParsedMessage(content=thinking + (before.strip() if mark else ""), calls=calls)


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    name = "mistral"
    _MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\](.*)", re.DOTALL)

    def text_before_calls(self, text: str) -> str:
        """The text before `[TOOL_CALLS]`, also before an end that may be the beginning of that mark."""
        return _before_mark(text, self._MARK)

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """Read the calls after each `[TOOL_CALLS]`."""
        thinking, text = split_thinking(message.text)
        before, *parts = text.split(self._MARK)
        calls = [call for part in parts for call in self._calls(part.strip())]
        return ParsedMessage(content=thinking + (before.strip() if parts else before), calls=calls)

    def _calls(self, text: str) -> list[ToolCall]:
        if named := self._NAMED.fullmatch(text):
            name, call_id, arguments = named.groups()
            value, error = _json(arguments)
            if error is not None:
                return [invalid_call(error, name)]
            return [read_call({"name": name, "arguments": value} | ({"id": call_id} if call_id else {}))]
        value, error = _json(text)
        if error is not None:
            return [invalid_call(error)]
        return [read_call(each) for each in (value if isinstance(value, list) else [value])]


PARSERS: Mapping[str, type[ToolCallParser]] = {parser.name: parser for parser in (HermesParser, MistralParser, Llama3Parser)}
"""By name, in the order in which they are tried."""


def split_thinking(text: str) -> tuple[str, str]:
    """The text up to the last `</think>`, and the rest; all of it is thinking if a `<think>` is not closed."""
    before, closing, after = text.rpartition("</think>")
    return (text, "") if "<think>" in after else (before + closing, after)


def _before_mark(text: str, mark: str) -> str:
    """The thinking, and the text before a mark, or before an end that may begin one, without trailing whitespace."""
    thinking, said = split_thinking(text)
    ends = (number for number in range(len(said)) if mark.startswith(said[number : number + len(mark)]))
    return thinking + said[: next(ends, len(said))].rstrip()


def _values(text: str) -> Iterator[tuple[Any, str | None]]:
    """The JSON values of a text, each with None, and the error at which reading stopped."""
    decoder = json.JSONDecoder(parse_constant=_reject_constant)
    position, found = 0, False
    while position < len(text) or not found:
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield None, _json_error(error)
            return
        yield value, None
        found = True
        position = re.compile(r"[\s;]*").match(text, position).end()  # type: ignore[union-attr]


def _call_in(text: str) -> ToolCall:
    value, error = _json(text)
    return invalid_call(error) if error is not None else read_call(value)


def _json(text: str) -> tuple[Any, str | None]:
    """The JSON value, and None; or None and why the text is not JSON."""
    try:
        return json.loads(text.strip(), parse_constant=_reject_constant), None
    except (ValueError, RecursionError) as error:
        return None, _json_error(error)


def _json_error(error: Exception) -> str:
    return f"the tool call is not valid JSON: {error if isinstance(error, ValueError) else 'it is nested too deeply'}"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_call(value: Any) -> ToolCall:
    """A call from `{name, arguments}` or `{name, parameters}`, perhaps within `function`; arguments may be JSON text."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if isinstance(inner, str) and isinstance(value, Mapping):
        inner = {**value, "name": inner}
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        return invalid_call(f"the tool call {format_value(value)} has no name: expected name and arguments")
    arguments: Any = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, error = _json(arguments)
        if error is not None:
            return invalid_call(error, inner["name"])
    if not isinstance(arguments, Mapping):
        return invalid_call(f"the arguments are {format_value(arguments)}: expected a JSON object", inner["name"])
    call: ToolCall = {"type": "function", "function": {"name": inner["name"], "arguments": dict(arguments)}}
    if isinstance(value.get("id"), str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value["id"]):
        call["id"] = value["id"]
    return call


def invalid_call(error: str, name: str = "") -> ToolCall:
    """A call that cannot be read, and why."""
    return {"type": "function", "function": {"name": name, "arguments": {}}, "error": error}
