"""The tokens of a whole conversation: rendered by the chat template, or its contents one after the other without a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rl_core.data.chat_template import check_names, form_for, render, with_calls_read
from rl_core.errors import DataError


def encode(text: str, tokenizer: Any) -> list[int]:
    """The text's token ids, with only those special tokens that are in the text."""
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def conversation_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation.

    Args:
        messages: `role` and `content`, and `tool_calls` in OpenAI's form.
        tokenizer: A Transformers tokenizer.
        add_generation_prompt: Whether to append the header of an assistant turn (only with a chat template).
        tools: Offered functions, for the template.

    Raises:
        DataError: The template cannot render the conversation, or omits tools; or there are tools and no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        refuse_tools(messages, tools)
        return list(chain.from_iterable(plain_pieces(messages, tokenizer)))
    read = with_calls_read(messages)
    form = form_for(read, tokenizer, tools=tools)
    text = render(read, tokenizer, form=form, add_generation_prompt=add_generation_prompt, tools=tools)
    check_names(read, text, {}, tools=tools)
    return encode(text, tokenizer)


def plain_pieces(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_bos: bool = True, add_eos: bool = True
) -> list[list[int]]:
    """The token ids of each message without a chat template: its content, without text between messages.

    Args:
        messages: `role` and `content`.
        tokenizer: A Transformers tokenizer.
        add_bos: Whether the tokenizer's BOS token, if any, opens the first message.
        add_eos: Whether its EOS token, if any, closes every assistant message.
    """
    pieces = [encode(message["content"], tokenizer) for message in messages]
    if pieces and add_bos and tokenizer.bos_token_id is not None:
        pieces[0].insert(0, tokenizer.bos_token_id)
    for message, piece in zip(messages, pieces, strict=True):
        if message["role"] == "assistant" and add_eos and tokenizer.eos_token_id is not None:
            piece.append(tokenizer.eos_token_id)
    return pieces


def refuse_tools(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    """Refuse tools, which only a chat template can render.

    Raises:
        DataError: Functions are offered or called.
    """
    if tools or any(message.get("tool_calls") for message in messages):
        raise DataError("the conversation has tools, which require a chat template: set one (policy.tokenizer.chat_template)")
