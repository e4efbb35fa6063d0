"""The tokens of a conversation without tools: rendered by the chat template, or its contents joined if there is no template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rl_core.errors import DataError


def encode(text: str, tokenizer: Any) -> list[int]:
    """The text's token ids, with only those special tokens that are in the text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of tokens as they are in the vocabulary, without cleaned-up spaces."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def conversation_tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = False
) -> list[int]:
    """The token ids of messages with `role` and `content`.

    `add_generation_prompt` appends the header of an assistant turn (only with a chat template).

    Raises:
        DataError: The template cannot render the conversation, or a message has tool calls.
    """
    from jinja2.exceptions import TemplateError

    if any(message.get("tool_calls") for message in messages):
        raise DataError("a message has `tool_calls`, which only rollouts and training data support")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        return list(chain.from_iterable(plain_pieces(plain, tokenizer)))
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError) as error:  # Jinja does not wrap errors raised by an expression of the template
        roles = [message["role"] for message in plain]
        raise DataError(f"the chat template cannot render messages of the roles {roles}: {error}") from error
    return encode(text, tokenizer)


def plain_pieces(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_bos: bool = True, add_eos: bool = True
) -> list[list[int]]:
    """The token ids of each message without a chat template: its content, without text between messages.

    The tokenizer's BOS token, if any, opens the first message with `add_bos`; its EOS token closes every assistant message with
    `add_eos`.
    """
    pieces = [encode(message["content"], tokenizer) for message in messages]
    if pieces and add_bos and tokenizer.bos_token_id is not None:
        pieces[0].insert(0, tokenizer.bos_token_id)
    for message, piece in zip(messages, pieces, strict=True):
        if message["role"] == "assistant" and add_eos and tokenizer.eos_token_id is not None:
            piece.append(tokenizer.eos_token_id)
    return pieces
