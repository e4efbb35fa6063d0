"""Tokenizes the messages of environments. Sampled tokens are kept and never retokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.data.chat_template import form_for, render
from rl_core.errors import DataError
from rl_core.interfaces.messages import Message, Observation, messages_of
from rl_train.rollouts.decoding import special_tokens

_USER: Mapping[str, Any] = {"role": "user", "content": "A"}
_ANSWER = "RLCORE"


class TurnFormatter:
    """Tokenizes an observation with the template's text around it and the generation prompt of the next answer.

    The text around the messages is found by rendering a conversation with a known answer: `closing` is the text of the template
    after an assistant's message. If the sampled tokens end with the end-of-turn token that the closing text starts with, it is
    not repeated. Messages of the role `tool` follow an answer with one call each, because templates expect that.

    Args:
        tokenizer: without a chat template, messages are concatenated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = tokenizer.chat_template is not None
        self._closing = self._closing_text() if self._has_template else ""

    def observation_ids(
        self, observation: Observation, sampled_ids: torch.Tensor, *, tools: Sequence[Any] | None = None
    ) -> torch.Tensor:
        """Token ids [T] between the model's message and its next one.

        Args:
            observation: the environment's message or messages.
            sampled_ids: [T'] the model's message, as sampled.
            tools: the tools offered in this conversation; some templates repeat them.

        Raises:
            DataError: the template cannot render the messages after an answer.
        """
        messages = messages_of(observation)
        if self._has_template:
            text = self._after_answer(messages, tools)
            text = text[len(self._repeated_end(text, sampled_ids)) :]
        else:
            text = "".join(message["content"] for message in messages)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)

    def _repeated_end(self, text: str, sampled_ids: torch.Tensor) -> str:
        """The end of turn with which the text starts, if the sampled tokens already have it or another one in its place."""
        if not sampled_ids.numel():
            return ""
        last, eos = int(sampled_ids[-1]), self._tokenizer.eos_token or ""
        if last == self._tokenizer.eos_token_id:
            return eos if text.startswith(eos) else ""
        # Llama 3 ends a turn that calls tools with <|eom_id|>, although its template writes <|eot_id|>.
        return self._leading_special(text) if last in special_tokens(self._tokenizer)[1] else ""

    def _leading_special(self, text: str) -> str:
        names = (self._tokenizer.convert_ids_to_tokens(number) for number in special_tokens(self._tokenizer)[1])
        return max((name for name in names if text.startswith(name)), key=len, default="")

    def _closing_text(self) -> str:
        rendered = self._render([_USER, {"role": "assistant", "content": _ANSWER}], None, next_answer=False)
        return rendered[rendered.rindex(_ANSWER) + len(_ANSWER) :]

    def _after_answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        history = [_USER, _answer_before(messages)]
        own = self._render(history, tools, next_answer=False)
        whole = self._render([*history, *messages], tools, next_answer=True)
        # The known text occurs equally often in both, and for the last time shortly before the answer's end.
        end_of_own = _split_after(own, own.count(_ANSWER))
        rest = _split_after(whole, own.count(_ANSWER))
        if not own.count(_ANSWER) or not rest.startswith(end_of_own):
            raise DataError(
                "The chat template renders an assistant's message differently if another message follows it, so the tokens "
                "of several turns cannot be joined. Use a template that does not change earlier turns "
                "(policy.tokenizer.chat_template), or an environment with one turn."
            )
        return self._closing_after(end_of_own) + rest[len(end_of_own) :]

    def _closing_after(self, end_of_answer: str) -> str:
        """What the template writes after the sampled part of an answer that ends like this, perhaps with a call's last braces."""
        if end_of_answer.endswith(self._closing):
            return self._closing
        starts = [i for i in range(len(end_of_answer)) if self._leading_special(end_of_answer[i:])]
        return end_of_answer[starts[0] :] if starts else self._closing

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, next_answer: bool) -> str:
        form = form_for(messages, self._tokenizer, tools=tools)
        return render(messages, self._tokenizer, form=form, add_generation_prompt=next_answer, tools=tools)


def _answer_before(messages: Sequence[Message]) -> dict[str, Any]:
    """An answer with known content, or with a call with known arguments for each tool result."""
    calls = [
        {
            "id": message.get("tool_call_id", f"call{number:05}"),
            "type": "function",
            "function": {"name": message.get("name") or "unknown", "arguments": {_ANSWER: _ANSWER}},
        }
        for number, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    if not calls:
        return {"role": "assistant", "content": _ANSWER}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _split_after(text: str, count: int) -> str:
    """The text after the `count`-th occurrence of the known answer; empty if there are fewer."""
    return text.split(_ANSWER, count)[-1] if text.count(_ANSWER) >= count else ""
