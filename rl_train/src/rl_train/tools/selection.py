"""Chooses the parser of a model's tool calls: the tokenizer's own, or the one that reads what the chat template writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import ConfigError, DataError, format_value
from rl_core.interfaces.messages import ToolCall
from rl_core.plugins.component import is_path
from rl_core.plugins.import_path import resolve
from rl_train.config.rules.environments import OWN_PARSER
from rl_train.data.chat_template import form_for, render
from rl_train.data.decoding import decode_answers
from rl_train.tools.parsers import PARSERS, ParsedMessage, SampledMessage, ToolCallParser, invalid_call

_NAME, _ARGUMENTS = "rlcoreprobe", {"rlcorekey": "rlcorevalue", "rlcorenumber": 7}


class ResponseTemplateParser(ToolCallParser):
    """Parses with `tokenizer.parse_response`, for tokenizers that describe the form of their responses.

    Args:
        tokenizer: A Transformers tokenizer with a `response_template`.
    """

    name = OWN_PARSER

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def parse(self, message: SampledMessage) -> ParsedMessage:
        """Read the calls with the template of the tokenizer; a response that it cannot read is one invalid call."""
        try:
            response = self._tokenizer.parse_response(
                list(message.token_ids), prefix=list(message.prompt_ids), tools=list(message.tools) or None
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
