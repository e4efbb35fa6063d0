"""Parses the tool calls in a model's message, in the formats of current chat templates.

The parser is the tokenizer's own, or the one that reads what the chat template writes.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from rl_core.errors import ConfigError, DataError, format_value
from rl_core.interfaces.records import ToolCall, ToolSpec
from rl_core.plugins.component import is_path
from rl_core.plugins.import_path import resolve
from rl_train.config.rules.rollouts import OWN_PARSER
from rl_train.data.chat_template import form_for, render
from rl_train.data.special_tokens import decode_answers


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


_NAME, _ARGUMENTS = "rlcoreprobe", {"rlcorekey": "rlcorevalue", "rlcorenumber": 7}


class ResponseTemplateParser(ToolCallParser):
    """Parses with `tokenizer.parse_response`, for tokenizers that describe the form of their responses.

    Args:
        tokenizer: A Transformers tokenizer with a `response_template`.
    """

    name = OWN_PARSER

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        call = tokenizer.response_template.get("fields", {}).get("tool_calls", {})
        self._has_types = isinstance(call, Mapping) and call.get("content") == "json"

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """Read the calls with the template of the tokenizer; a response that it cannot read is one invalid call."""
        # Transformers 5.19 appends calls to the default list of the template, and casts texts of JSON with schemas of tools.
        template = deepcopy(self._tokenizer.response_template)
        tools = None if self._has_types else list(message.tools) or None
        try:
            response = self._tokenizer.parse_response(
                list(message.token_ids), template, prefix=list(message.prompt_ids), tools=tools
            )
        except (ValueError, KeyError, TypeError) as error:
            return ParsedMessage(content="", calls=[invalid_call(f"the response cannot be parsed: {error}")])
        calls: list[ToolCall] = []
        for call in response.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            name, arguments = function.get("name"), function.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                calls.append(invalid_call(f"the tool call {format_value(call)} needs a name and an object of arguments"))
            else:
                calls.append({"type": "function", "function": {"name": name, "arguments": dict(arguments)}})
        return ParsedMessage(content=str(response.get("content") or "") if calls else message.text, calls=calls)


def choose_parser(tokenizer: Any, name: str | None = None) -> ToolCallParser:
    """The parser of this name, or the one that fits the tokenizer.

    A tokenizer with a `response_template` parses its own responses. For others, the chat template renders a known call, and the
    first parser that reads exactly this call is used.

    Args:
        tokenizer: A Transformers tokenizer.
        name: `env.<task>.tool_parser`; None to choose.

    Raises:
        ConfigError: There is no such parser, or none fits.
    """
    has_own = getattr(tokenizer, OWN_PARSER, None) is not None
    if name == OWN_PARSER or (name is None and has_own):
        if not has_own:
            raise ConfigError(
                f"tool_parser: the tokenizer has no {OWN_PARSER}. Use {', '.join(PARSERS)}, or null to choose one."
            )
        return ResponseTemplateParser(tokenizer)
    if name is not None:
        return parser_named(name)()
    message = _probe(tokenizer)
    for parser in PARSERS.values():
        if [call["function"] for call in parser().parse(message).calls] == [{"name": _NAME, "arguments": _ARGUMENTS}]:
            return parser()
    raise ConfigError(
        f"No parser of tool calls fits the chat template, which writes a call as {message.text!r}. Set env.<task>.tool_parser "
        f"to {', '.join(PARSERS)} or the dotted path of a class, or use a tokenizer with a {OWN_PARSER}."
    )


def parser_named(name: str) -> type[ToolCallParser]:
    """The packaged parser of this name, or the class at this path.

    Raises:
        ConfigError: There is none.
    """
    if name in PARSERS:
        return PARSERS[name]
    if not is_path(name):
        raise ConfigError(
            f"tool_parser is {name!r}: expected {OWN_PARSER}, {', '.join(PARSERS)}, or the dotted path of a class."
        )
    found = resolve(name, key="tool_parser")
    if not isinstance(found, type) or not issubclass(found, ToolCallParser):
        raise ConfigError(f"tool_parser: {name} is not a subclass of rl_train.tools.parsers.ToolCallParser.")
    return found


def parse_message(parser: ToolCallParser, message: SampledMessage, earlier: Sequence[Mapping[str, Any]]) -> ParsedMessage:
    """Parse a message and give each call an id that is unique in its conversation.

    An id that the model wrote is kept if it is unique. Others are nine letters and digits, because some templates reject
    anything else.

    Args:
        parser: The parser.
        message: The message.
        earlier: The messages before it.
    """
    parsed = parser.parse(message)
    made = [call for each in earlier for call in each.get("tool_calls") or ()]
    taken = {call.get("id") for call in made}
    named: list[ToolCall] = []
    for number, found in enumerate(parsed.calls, start=len(made)):
        call = _encodable(found)
        own = call.get("id")
        call_id = own if own is not None and own not in taken else f"call{number:05}"
        taken.add(call_id)
        named.append({**call, "id": call_id})
    return ParsedMessage(content=parsed.content, calls=named)


def _encodable(call: ToolCall) -> ToolCall:
    """The call, or an invalid one if it has an unpaired surrogate, which cannot be tokenized or written as UTF-8."""
    try:
        json.dumps(call, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return invalid_call("the tool call has an unpaired surrogate, which is not a valid character")
    return call


def _probe(tokenizer: Any) -> SampledMessage:
    """A message with one known call, as the chat template writes it."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("Tools require a chat template, and the tokenizer has none: set policy.tokenizer.chat_template.")
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    asked = {"role": "user", "content": "A"}
    messages: list[dict[str, Any]] = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        form = form_for(messages, tokenizer, tools=None)
        prompt = render([asked], tokenizer, form=form, add_generation_prompt=True)
        whole = render(messages, tokenizer, form=form, add_generation_prompt=False)
    except DataError as error:
        raise ConfigError(f"No parser of tool calls can be chosen: {error}.") from error
    text = whole.removeprefix(prompt)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return SampledMessage(text=decode_answers(tokenizer, [ids])[0].strip(), token_ids=ids)
