"""Renders conversations of OpenAI's API for a model, with tools, and reads the model's messages and their tool calls.

Independent of the endpoint: whatever answers conversations with sampled tokens may use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rl_core.data.images import RowImage
from rl_core.errors import ConfigError, DataError, format_value
from rl_core.interfaces.records import ToolCall, text_of
from rl_serve.errors import ApiError
from rl_serve.requests import refuse_large_schema
from rl_train.data.chat_template import ROLES, conversation_tokens
from rl_train.data.conversations import read_tools
from rl_train.data.image_sources import ImageSource
from rl_train.data.images import located, read_images
from rl_train.data.special_tokens import decode_answers
from rl_train.tools.parsers import (
    MistralParser,
    ParsedMessage,
    SampledMessage,
    ToolCallParser,
    choose_parser,
    parse_message,
    split_thinking,
)

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
        if not isinstance(tools, list | None):
            raise DataError(f"tools is {type(tools).__name__}: expected a list of functions")
        read = read_tools(tools, "tools")
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


_IGNORED = ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content", "tool_calls")
"""Fields of messages that clients send back as they received them, and that change nothing if they are empty."""
_DETAILS = (None, "auto", "low", "high")
_FIELDS = {"assistant": ("name", "tool_calls"), "tool": ("name", "tool_call_id")}
"""Fields of a message besides role and content, by role; other roles have `name`."""


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """A message of the model."""

    content: str
    """Its text, without the text of its calls."""
    tool_calls: Sequence[ToolCall] = ()
    """Its calls, each with an id that is unique in the conversation and with arguments as an object."""

    def as_openai(self) -> dict[str, Any]:
        """The message in OpenAI's form: arguments are JSON text, and the content is null if there are only calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = []
            for call in self.tool_calls:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                function = {"name": call["function"]["name"], "arguments": arguments}
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
        return message


class ChatFormat:
    """The chat format of one model.

    Args:
        tokenizer: the model's Transformers tokenizer.
        tool_parser: name of a parser of tool calls, or the dotted path of its class; chosen by the chat template if None.
        max_images: largest number of images in a conversation; None for no limit.
    """

    def __init__(self, tokenizer: Any, *, tool_parser: str | None = None, max_images: int | None = None) -> None:
        self._tokenizer, self._parser_name, self._max_images = tokenizer, tool_parser, max_images

    def with_references(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Sequence[RowImage]]:
        """The conversation with references to its images, as environments have them, and these images, which are read now.

        Args:
            messages: from `read_messages`.

        Raises:
            ApiError: an image cannot be read, there are too many, or the model reads none.
        """
        contents = (message["content"] for message in messages if isinstance(message["content"], list))
        count = sum(part["type"] != "text" for content in contents for part in content)
        if not count:
            return messages, ()
        if self._max_images is not None and count > self._max_images:
            raise ApiError(400, f"The messages have {count} images: at most {self._max_images} are allowed.", param="messages")
        try:
            read, found = read_images(messages, self._tokenizer)
        except (DataError, ConfigError) as error:
            text = f"{str(error)[:1].upper()}{str(error)[1:].rstrip('.')}."
            raise ApiError(400, text, param="messages", code="invalid_image") from error
        return read, found

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[RowImage] = (), tools: OfferedTools = NO_TOOLS
    ) -> tuple[list[int], Sequence[RowImage]]:
        """Token ids of a conversation, up to the header of the model's next message, and its images with their places in them.

        Args:
            messages: from `with_references`.
            images: also from there.
            tools: from `read_offered_tools`.

        Raises:
            ApiError: the chat template cannot render the conversation or renders no tokens, or the model has no format for tool
                calls.
        """
        _ = self._parser_of(tools) if tools else None
        try:
            tokens = conversation_tokens(
                messages, self._tokenizer, add_generation_prompt=True, tools=list(tools.functions) or None, images=images
            )
            placed = located(images, tokens)
        except DataError as error:
            cause = error if images else error.__cause__
            reason = ", or would leave out a part of them." if cause is None else f": {cause}"
            raise ApiError(
                400,
                f"The model's chat template does not support these messages{' and tools' if tools else ''}{reason}",
                param="tools" if tools else "messages",
            ) from error
        if not tokens:
            raise ApiError(400, "The messages are empty: they must have at least one token.", param="messages")
        return tokens, placed

    def answer(
        self,
        token_ids: Sequence[int],
        text: str,
        *,
        prompt: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: OfferedTools = NO_TOOLS,
        complete: bool = True,
    ) -> AssistantMessage:
        """The message that the model sampled.

        Without tools, or if a call cannot be read, the whole text is the content. A message that a length limit cut off has no
        calls, because a call in it may be incomplete.

        Args:
            token_ids: sampled tokens.
            text: their text without hidden tokens and without a stop string.
            prompt: the tokens before them.
            messages: the conversation before this message.
            tools: the functions that the model was shown.
            complete: whether the message was not cut off.
        """
        if not tools or not complete:
            return AssistantMessage(content=text)
        [decoded] = decode_answers(self._tokenizer, [token_ids])
        sampled = SampledMessage(text=decoded, token_ids=list(token_ids), prompt_ids=list(prompt), tools=list(tools.functions))
        parsed = parse_message(self._parser_of(tools), sampled, messages)
        if not parsed.calls or any(call.get("error") for call in parsed.calls):
            return AssistantMessage(content=text)
        return AssistantMessage(content=_with_leading_space(parsed.content, text), tool_calls=parsed.calls)

    def text_before_calls(self, text: str, tools: OfferedTools) -> str:
        """The beginning of an unfinished message that is part of its content, whatever follows."""
        return self._parser_of(tools).text_before_calls(text)

    def _parser_of(self, tools: OfferedTools) -> ToolCallParser:
        return self._parser if tools.schema is None else RequiredCallsParser()

    @cached_property
    def _parser(self) -> ToolCallParser:
        try:
            return choose_parser(self._tokenizer, self._parser_name)
        except ConfigError as error:
            raise ApiError(
                400,
                "This model does not support tools: no parser of tool calls fits its chat template.",
                param="tools",
                code="unsupported_parameter",
            ) from error


def read_messages(
    messages: Sequence[Mapping[str, Any]], *, images: Mapping[str, RowImage] | None = None
) -> list[dict[str, Any]]:
    """The messages of a request for `ChatFormat`: content is text, or a list of parts if it has images, as they were sent.

    Unset fields are left out.

    Args:
        messages: the messages of the body.
        images: images that were read before, by the URLs that name them.

    Raises:
        ApiError: a message has content that is neither text nor an image in the request, or a field that would be ignored.
    """
    return [_read_message(message, f"messages[{number}]", images or {}) for number, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], where: str, images: Mapping[str, RowImage]) -> dict[str, Any]:
    role = message["role"]
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is {role!r}: expected one of {', '.join(ROLES)}.", param=f"{where}.role")
    content = message.get("content")
    read: dict[str, Any] = {"role": role, "content": ""}
    if content is not None:
        read["content"] = _read_content(content, role, f"{where}.content", images)
    elif not message.get("tool_calls"):
        raise ApiError(400, f"{where}.content is required.", param=f"{where}.content")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None and not (name in _IGNORED and not value):
            read[name] = _field(name, value, role, f"{where}.{name}")
    return read


def _read_content(content: Any, role: str, where: str, images: Mapping[str, RowImage]) -> str | list[dict[str, Any]]:
    """A text, or the parts of a content with images."""
    if not isinstance(content, list) or not any(part.get("type") == "image_url" for part in content):
        return _read_text(content, where)
    if role == "assistant":
        raise ApiError(400, f"{where} has an image, but messages of the assistant are text.", param=where)
    return [_read_part(part, f"{where}[{number}]", images) for number, part in enumerate(content)]


def _read_text(content: Any, where: str) -> str:
    try:
        return text_of(content, where)
    except DataError as error:
        raise ApiError(
            400,
            f'{where} must be a string or a list of {{"type": "text", "text": STRING}} and '
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}: other parts are not supported.',
            param=where,
        ) from error


def _read_part(part: Mapping[str, Any], where: str, images: Mapping[str, RowImage]) -> dict[str, Any]:
    """A part of a content with images. No file of this machine and no other server is ever read for a client."""
    if part.get("type") != "image_url":
        return {"type": "text", "text": _read_text([part], where)}
    image = part.get("image_url")
    image = image if isinstance(image, Mapping) else {}
    url, detail = image.get("url"), image.get("detail")
    if not isinstance(url, str) or detail not in _DETAILS:
        details = ", ".join(filter(None, _DETAILS))
        text = f'{where}.image_url must be {{"url": STRING}}, with an optional `detail` ({details}), which has no effect.'
        raise ApiError(400, text, param=f"{where}.image_url")
    if url in images:
        return {"type": "image", "image": ImageSource(images[url])}
    if not url.startswith("data:"):
        raise ApiError(
            400,
            f"{where}.image_url.url is {format_value(url)}, but images are not downloaded. Send the content of the file as "
            "`data:image/png;base64,...`.",
            param=f"{where}.image_url.url",
        )
    return {"type": "image_url", "image_url": {"url": url} if detail is None else {"url": url, "detail": detail}}


def _field(name: str, value: Any, role: str, where: str) -> Any:
    if name not in _FIELDS.get(role, ("name",)):
        raise ApiError(400, f"{where} is not supported in a message of the role {role}.", param=where)
    if name != "tool_calls" and not isinstance(value, str):
        raise ApiError(400, f"{where} must be a string.", param=where)
    return value


def _with_leading_space(content: str, text: str) -> str:
    """The content of a message with calls, with the whitespace at its beginning, as in a message without calls.

    Streams send that whitespace before it is known whether calls follow.
    """
    thinking, said = split_thinking(text)
    space = said[: len(said) - len(said.lstrip())]
    rest = content.removeprefix(thinking)
    return thinking + space + rest.lstrip() if space and rest and content.startswith(thinking) else content
