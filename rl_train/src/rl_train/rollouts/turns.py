"""Tokenizes the messages of environments. Sampled tokens are kept and never retokenized."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.errors import DataError
from rl_core.interfaces.environment import Message

_USER: Message = {"role": "user", "content": "A"}
_ANSWER = "RLCORE"


class TurnFormatter:
    """Tokenizes an environment's message with the template's text around it and the generation prompt of the next answer.

    The text around a message is found by rendering a conversation with a known answer: `closing` is the text of the template
    after an assistant's message. If the sampled tokens end with the end-of-sequence token that the closing text starts with,
    it is not repeated.

    Args:
        tokenizer: without a chat template, messages are concatenated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = tokenizer.chat_template is not None
        self._closing = self._closing_text() if self._has_template else ""
        self._eos: str = tokenizer.eos_token or ""

    def observation_ids(self, message: Message, sampled_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [T] between the model's message and its next one.

        Args:
            message: the environment's message.
            sampled_ids: [T'] the model's message, as sampled.
        """
        text = self._after_answer(message) if self._has_template else message["content"]
        ended = sampled_ids.numel() > 0 and int(sampled_ids[-1]) == self._tokenizer.eos_token_id
        if ended and self._eos and text.startswith(self._eos):
            text = text[len(self._eos) :]
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _closing_text(self) -> str:
        rendered = self._render([_USER, {"role": "assistant", "content": _ANSWER}], next_answer=False)
        return rendered[rendered.rindex(_ANSWER) + len(_ANSWER) :]

    def _after_answer(self, message: Message) -> str:
        role = "user" if message["role"] == "environment" else message["role"]
        turn = {**message, "role": role}
        history: list[Message] = [_USER, {"role": "assistant", "content": _ANSWER}]
        rendered = self._render([*history, turn], next_answer=True)
        _, found, after = rendered.partition(_ANSWER)
        if not found or not after.startswith(self._closing):
            raise DataError(
                "The chat template renders an assistant's message differently if another message follows it, so the tokens "
                "of several turns cannot be joined. Use a template that does not change earlier turns "
                "(policy.tokenizer.chat_template), or an environment with one turn."
            )
        return after

    def _render(self, messages: list[Message], *, next_answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=next_answer)
        return text
