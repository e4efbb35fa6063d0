"""Tokenizes the messages of environments. Sampled tokens are kept and never retokenized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from rl_core.data.conversation_tokens import encode
from rl_core.errors import DataError
from rl_core.interfaces.messages import Message, Observation, messages_of
from rl_train.data.chat_template import form_for, render
from rl_train.data.decoding import control_tokens
from rl_train.data.guarded_text import guarded

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
        control = control_tokens(tokenizer)
        self._control_names, self._control_ids = list(control), set(control.values())
        self._eos, self._eos_id = tokenizer.eos_token or "", tokenizer.eos_token_id
        self._history = lru_cache(maxsize=64)(self._rendered_history)
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
        if (tokenizer := guarded(self._tokenizer, messages, tools)) is not self._tokenizer:
            return _formatter(tokenizer).observation_ids(observation, sampled_ids, tools=tools)
        if self._has_template:
            text = self._after_answer(messages, tools)
            text = text[len(self._repeated_end(text, sampled_ids)) :]
        else:
            text = "".join(message["content"] for message in messages)
        return torch.tensor(encode(text, self._tokenizer), dtype=torch.int64)

    def _repeated_end(self, text: str, sampled_ids: torch.Tensor) -> str:
        """The end of turn with which the text starts, if the sampled tokens already have it or another one."""
        if not sampled_ids.numel():
            return ""
        last = int(sampled_ids[-1])
        if last == self._eos_id:
            return self._eos if text.startswith(self._eos) else ""
        # Llama 3 ends a turn that calls tools with <|eom_id|>, although its template writes <|eot_id|>.
        return self._leading_control(text) if last in self._control_ids else ""

    def _leading_control(self, text: str) -> str:
        return max((name for name in self._control_names if text.startswith(name)), key=len, default="")

    def _closing_text(self) -> str:
        rendered = self._history(json.dumps([{"role": "assistant", "content": _ANSWER}, None]))
        return rendered[rendered.rindex(_ANSWER) + len(_ANSWER) :]

    def _after_answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        problems = []
        for answer in _answers_before(messages):
            try:
                return self._after(answer, messages, tools)
            except DataError as error:
                problems.append(error)
        raise problems[0]

    def _after(self, answer: Mapping[str, Any], messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        history_text = self._history(json.dumps([answer, tools]))
        rendered = self._render([_USER, answer, *messages], tools, next_answer=True)
        # The known text occurs equally often in both, and for the last time shortly before the answer's end.
        end_of_own = _split_after(history_text, history_text.count(_ANSWER))
        rest = _split_after(rendered, history_text.count(_ANSWER))
        if not history_text.count(_ANSWER) or not rest.startswith(end_of_own):
            raise DataError(
                "The chat template renders an assistant's message differently if another message follows it, so the tokens "
                "of several turns cannot be joined. Set rollout.history to `template`, which renders each prompt again, or use "
                "a template that does not change earlier turns (policy.tokenizer.chat_template)."
            )
        return self._closing_after(end_of_own) + rest[len(end_of_own) :]

    def _closing_after(self, end_of_answer: str) -> str:
        """What the template writes after the sampled part of an answer, possibly including a tool call's closing braces."""
        if end_of_answer.endswith(self._closing):
            return self._closing
        starts = [i for i in range(len(end_of_answer)) if self._leading_control(end_of_answer[i:])]
        return end_of_answer[starts[0] :] if starts else self._closing

    def _rendered_history(self, answer_and_tools: str) -> str:
        """The known conversation; the argument is JSON, as the key of a cache: most turns follow the same answer."""
        answer, tools = json.loads(answer_and_tools)
        return self._render([_USER, answer], tools, next_answer=False)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, next_answer: bool) -> str:
        form = form_for(messages, self._tokenizer, tools=tools)
        return render(messages, self._tokenizer, form=form, add_generation_prompt=next_answer, tools=tools)


_formatter = lru_cache(maxsize=16)(TurnFormatter)


def _answers_before(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Answers that the messages may follow, the best first: with a call for each tool result, with one call, without calls.

    Their content, or the arguments of their calls, are known.
    """
    calls = [
        {
            "id": message.get("tool_call_id", f"call{number:05}"),
            "type": "function",
            "function": {"name": message.get("name") or "unknown", "arguments": {_ANSWER: _ANSWER}},
        }
        for number, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    numbers = dict.fromkeys((len(calls), 1)) if calls else ()
    return [
        *({"role": "assistant", "content": "", "tool_calls": calls[:count]} for count in numbers),
        {"role": "assistant", "content": _ANSWER},
    ]


def _split_after(text: str, count: int) -> str:
    """The text after the `count`-th occurrence of the known answer; empty if there are fewer."""
    return text.split(_ANSWER, count)[-1] if text.count(_ANSWER) >= count else ""
