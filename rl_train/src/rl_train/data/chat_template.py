"""Renders conversations with a chat template, with tools and calls in the form that the template expects.

Templates differ in how they expect a call: arguments as an object or as JSON text, missing content as an empty string or as
None. Given the wrong form they silently omit the call, or quote a text within a text. Each template is therefore probed once,
with a conversation of known names, and the form is used in which nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from rl_core.data.images import RowImage
from rl_core.data.tokenizer import encode, plain_pieces
from rl_core.errors import DataError
from rl_train.data.conversations import is_begun, read_calls
from rl_train.data.image_sources import image_parts
from rl_train.data.special_tokens import guarded, in_parts, needs_parts, template_text

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that chat templates have; any other role, such as `environment`, is rendered as `user`."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The form in which a template expects messages with tool calls.

    Attributes:
        arguments_as_text: Whether arguments are JSON text instead of an object.
        empty_content: Content of a message with only calls.
        text_as_parts: Whether a text is a list with one part, because the template omits contents that are texts.
    """

    arguments_as_text: bool = False
    empty_content: str | None = ""
    text_as_parts: bool = False

    def written(self, message: Message) -> dict[str, Any]:
        """The message as the template expects it, without our tensors; `user` replaces roles that no template has."""
        plain = {key: value for key, value in message.items() if not isinstance(value, torch.Tensor) and key != "images"}
        if isinstance(plain.get("content"), list):
            plain["content"] = [part if part["type"] == "text" else {"type": "image"} for part in plain["content"]]
        if plain["role"] not in ROLES:
            plain["role"] = "user"
        if plain.get("tool_calls"):
            plain["content"] = plain.get("content") or self.empty_content
            if self.arguments_as_text:
                plain["tool_calls"] = [_with_text(call) for call in plain["tool_calls"]]
        return in_parts([plain])[0] if self.text_as_parts else plain


@dataclass(frozen=True, kw_only=True)
class ToolUsage:
    """Tool features that a conversation uses and a template must support.

    Attributes:
        offers: Whether functions are offered.
        calls: Maximum number of calls in a message.
        results: Whether there are tool results.
    """

    offers: bool
    calls: int
    results: bool


FORMS = tuple(ToolFormat(arguments_as_text=text, empty_content=empty) for text in (False, True) for empty in ("", None))


def with_normalized_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with their tool calls in the form of `conversations.read_calls`.

    Raises:
        DataError: A call is invalid.
    """
    return [
        {**message, "tool_calls": read_calls(message["tool_calls"], f"message {number}")}
        if message.get("tool_calls")
        else message
        for number, message in enumerate(messages)
    ]


def form_for(messages: Sequence[Message], tokenizer: Any, *, tools: Sequence[Any] | None) -> ToolFormat:
    """The form in which the tokenizer's template renders all tool features of a conversation.

    Args:
        messages: The whole conversation, from `with_normalized_calls`.
        tokenizer: A Transformers tokenizer with a chat template.
        tools: The offered functions.

    Raises:
        DataError: The template omits something in every form.
    """
    said = ToolUsage(
        offers=bool(tools),
        calls=min(2, max((len(message.get("tool_calls") or ()) for message in messages), default=0)),
        results=any(message["role"] == "tool" for message in messages),
    )
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    if said == ToolUsage(offers=False, calls=0, results=False):
        return ToolFormat(text_as_parts=needs_parts(tokenizer, template))
    return _form_of(tokenizer, template, said)


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    form: ToolFormat,
    add_generation_prompt: bool,
    tools: Sequence[Any] | None = None,
    images: Sequence[RowImage] = (),
) -> str:
    """Render messages with the tokenizer's template. With `add_generation_prompt`, a begun answer is continued.

    `images` are those of a conversation that begins with the messages; the text has what stands for those in the messages.

    Raises:
        DataError: It cannot render them.
    """
    from jinja2.exceptions import TemplateError

    continues = add_generation_prompt and is_begun(messages)
    try:
        text = template_text(
            tokenizer,
            [form.written(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt and not continues,
            continue_final_message=continues,
        )
    # Jinja does not wrap errors raised by an expression; ValueError: the template leaves out the begun answer.
    except (TemplateError, TypeError, ValueError) as error:
        roles = [message["role"] for message in messages]
        raise DataError(f"the chat template cannot render messages of the roles {roles}: {error}") from error
    if images:
        from rl_train.data.images import with_images

        return with_images(text, images[: len(image_parts(messages))], tokenizer)
    return text


def unclosed(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages for a model without a template, which closes answers but not a begun one."""
    return [*messages[:-1], {**messages[-1], "role": "environment"}] if is_begun(messages) else messages


def conversation_tokens(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
    images: Sequence[RowImage] = (),
) -> list[int]:
    """The token ids of a conversation, which may have tools if the tokenizer has a chat template.

    Args:
        messages: `role` and `content`, and `tool_calls` in OpenAI's form.
        tokenizer: A Transformers tokenizer.
        add_generation_prompt: Whether to append the header of an assistant turn (only with a chat template); the last message
            is continued instead if it has `prefix: true`.
        tools: Offered functions, for the template.
        images: The images in the messages, in their order; the tokenizer has a chat template.

    Raises:
        DataError: The template cannot render the conversation, or omits tools or an image; or there are tools and no template.
    """
    tokenizer = guarded(tokenizer, messages, tools)
    if not getattr(tokenizer, "chat_template", None):
        refuse_tools(messages, tools)
        return list(chain.from_iterable(plain_pieces(unclosed(messages) if add_generation_prompt else messages, tokenizer)))
    read = with_normalized_calls(messages)
    form = form_for(read, tokenizer, tools=tools)
    text = render(read, tokenizer, form=form, add_generation_prompt=add_generation_prompt, tools=tools, images=images)
    check_names(read, text, {}, tools=tools)
    return encode(text, tokenizer)


def refuse_tools(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> None:
    """Refuse tools, which only a chat template can render.

    Raises:
        DataError: Functions are offered or called.
    """
    if tools or any(message.get("tool_calls") for message in messages):
        raise DataError("the conversation has tools, which require a chat template: set one (policy.tokenizer.chat_template)")


def check_names(
    messages: Sequence[Message], text: str, spans: Mapping[int, tuple[int, int]], *, tools: Sequence[Any] | None
) -> None:
    """Check that a rendered conversation names the functions offered and called.

    Args:
        messages: The conversation.
        text: The whole text.
        spans: Span of each trained message, which must name the functions it calls.
        tools: The offered functions.

    Raises:
        DataError: An offered or called function is not named.
    """
    for name in (_function(tool).get("name", "") for tool in tools or ()):
        if name not in text:
            raise _left_out(f"the function {name!r}, which the row offers")
    for number, message in enumerate(messages):
        start, end = spans.get(number, (0, len(text)))
        for name in (call["function"]["name"] for call in message.get("tool_calls") or ()):
            if name not in text[start:end]:
                raise _left_out(f"the call of {name!r} in message {number} (from 0)")


_USER = {"role": "user", "content": "rlcorequestion"}
_CALLED = ("rlcorefirst", "rlcoresecond")
_OFFERED = "rlcoreoffered"


@lru_cache(maxsize=64)
def _form_of(tokenizer: Any, template: str, said: ToolUsage) -> ToolFormat:
    """The first form that omits nothing; the template is an argument because a tokenizer's may be replaced."""
    problems = []
    for form in FORMS if said.calls else FORMS[:1]:
        form = replace(form, text_as_parts=needs_parts(tokenizer, template))
        problem = _problem(tokenizer, form, said)
        if problem is None:
            return form
        problems.append(problem)
    raise problems[0]


def _problem(tokenizer: Any, form: ToolFormat, said: ToolUsage) -> DataError | None:
    names = _CALLED[: said.calls]
    messages: list[dict[str, Any]] = [_USER]
    messages.append(
        {"role": "assistant", "content": "", "tool_calls": [_probe_call(name) for name in names]}
        if names
        else {"role": "assistant", "content": "rlcoreanswer"}
    )
    if said.results:
        messages += [
            {"role": "tool", "name": name, "tool_call_id": _probe_id(name), "content": f"{name}result"}
            for name in names or _CALLED[:1]
        ]
    tools = [_probe_tool(name) for name in (*names, _OFFERED)] if said.offers else None
    try:
        text = render(messages, tokenizer, form=form, add_generation_prompt=False, tools=tools)
    except DataError as error:
        return error
    after = text.rpartition(_USER["content"])[2]
    if said.offers and _OFFERED not in text:
        return _left_out("the functions that a row offers")
    for name in names:
        if not all(part in after for part in (name, f"{name}key", f"{name}value")):
            return _left_out("tool calls" if name == _CALLED[0] else "all calls of a message but the first")
    if "{'" in after:
        return DataError("the chat template writes arguments in Python syntax instead of JSON: add `| tojson`")
    if form.empty_content is None and "None" in after:
        return _left_out("tool calls of a message without content")
    if said.results and not all(f"{name}result" in after for name in names or _CALLED[:1]):
        return _left_out("tool results")
    return None


def _left_out(what: str) -> DataError:
    return DataError(
        f"the chat template leaves out {what}, so the model would be trained on a different conversation than the data has. "
        "Use a template that includes it (policy.tokenizer.chat_template), or data without it (`tools_key: null` for no tools)"
    )


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _function(tool: Any) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function


def _probe_id(name: str) -> str:
    """Nine letters and digits, because some templates reject other ids."""
    return f"call{_CALLED.index(name):05}"


def _probe_call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {f"{name}key": f"{name}value"}}
    return {"id": _probe_id(name), "type": "function", "function": function}


def _probe_tool(name: str) -> dict[str, Any]:
    properties = {f"{name}key": {"type": "string", "description": "What to look for."}}
    parameters = {"type": "object", "properties": properties, "required": [f"{name}key"]}
    return {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": parameters}}
