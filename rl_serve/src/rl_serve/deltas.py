"""Responses of sampled completions: whole, or as streams of deltas that together are the choices of a whole response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from rl_serve.chat_format import AssistantMessage, ChatFormat, OfferedTools
from rl_serve.engine import SampledRow, TokenizerThreads
from rl_serve.errors import ApiError
from rl_serve.responses import DONE, ChoiceFormat, IncrementalText, ResponseHead, cut_at_possible_stop, server_sent_event, usage


class RowDeltas:
    """What is new in one completion each time that it arrives.

    Args:
        tokenizer: decodes tokens.
        stop_strings: strings that end the text.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._text = IncrementalText(tokenizer)
        self._stop_strings = stop_strings
        self._tokens: list[int] = []
        self.sent = ""
        """Text of all deltas so far."""

    def new_tokens(self, row: SampledRow) -> SampledRow:
        """The tokens that were not there at the last call.

        Raises:
            ApiError: the completion was sampled again, and its tokens differ from those that were sent.
        """
        start = len(self._tokens)
        both = min(start, len(row.token_ids))  # a row that is sampled again with the same seed may not have caught up
        if row.token_ids[:both] != self._tokens[:both] or (row.is_finished and both < start):
            raise ApiError(
                503,
                "The engine had to sample this completion again, and its tokens differ from those already sent: a replica was "
                "restarted, or the weights were updated. Repeat the request.",
                code="completion_changed",
            )
        self._tokens = max(self._tokens, row.token_ids, key=len)
        return replace(
            row,
            token_ids=row.token_ids[start:],
            logprobs=row.logprobs[start:],
            top_logprobs=None if row.top_logprobs is None else row.top_logprobs[start:],
            before=row.token_ids[:start],
        )

    def stable_text(self, token_ids: Sequence[int]) -> str:
        """The text that later tokens cannot change and that is not the beginning of a stop string."""
        return cut_at_possible_stop(self._text.read(token_ids), self._stop_strings)

    def new_text(self, text: str, *, is_finished: bool) -> str:
        """The text that was not sent yet.

        Raises:
            ApiError: the finished text does not begin with what was sent.
        """
        if text.startswith(self.sent):
            new, self.sent = text[len(self.sent) :], text
            return new
        if is_finished:
            raise ApiError(
                500,
                "The text of the finished completion does not begin with the text that was already sent. "
                "Repeat the request without `stream`.",
                code="text_changed",
            )
        return ""


class Deltas(ABC):
    """The choices of one response, whole or as deltas.

    Args:
        choices: form of the choices.
    """

    def __init__(self, choices: ChoiceFormat) -> None:
        self.choices = choices
        self._rows: dict[int, RowDeltas] = {}

    @abstractmethod
    def head(self, model: str, *, is_stream: bool) -> ResponseHead:
        """The fields that all chunks of a response share."""

    @abstractmethod
    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        """The choice of a finished completion."""

    def choice(self, index: int, row: SampledRow) -> Mapping[str, Any] | None:
        """The delta of a completion that has new tokens or has ended; None if there is nothing to send yet.

        Raises:
            ApiError: the completion has changed, see `RowDeltas`.
        """
        if index not in self._rows:
            self._rows[index] = RowDeltas(self.choices.tokenizer, self.choices.plan.rows[index].stop_strings)
        state = self._rows[index]
        new = state.new_tokens(row)
        message = self._message(index, row) if row.is_finished else AssistantMessage(content=self._stable_text(state, row))
        text = state.new_text(message.content, is_finished=row.is_finished)
        if not (text or row.is_finished or self.choices.shows_tokens):
            return None
        return self._delta(index, new, replace(message, content=text))

    def _message(self, index: int, row: SampledRow) -> AssistantMessage:
        """The message of a finished completion."""
        return AssistantMessage(content=self.choices.text(index, row))

    def _stable_text(self, state: RowDeltas, row: SampledRow) -> str:
        """The text of an unfinished completion that can be sent."""
        return state.stable_text(row.token_ids)

    @abstractmethod
    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        """The choice with the new tokens and the new part of the message."""


class CompletionDeltas(Deltas):
    """The deltas of `/v1/completions`.

    Args:
        choices: form of the choices.
        echoed: text of each prompt, with which the texts of its choices begin; empty for none.
    """

    def __init__(self, choices: ChoiceFormat, echoed: Sequence[str] = ()) -> None:
        super().__init__(choices)
        self._offsets: dict[int, int] = defaultdict(int)
        self._echoed = dict(enumerate(text for text in echoed for _ in range(choices.plan.n)))

    def head(self, model: str, *, is_stream: bool) -> ResponseHead:
        return ResponseHead.of_completions(model)

    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        return self.choices.completion(index, row, text=self._echoed.get(index, "") + self.choices.text(index, row))

    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        text = self._echoed.pop(index, "") + message.content
        choice = self.choices.completion(index, new, text=text, offset=self._offsets[index])
        if self.choices.logprobs:
            self._offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
        return choice


class ChatDeltas(Deltas):
    """The deltas of `/v1/chat/completions`: text up to the first tool call, and the calls when the message is complete.

    Args:
        choices: form of the choices.
        chat: the model's chat format.
        messages: the conversation.
        tools: the functions that the model was shown.
    """

    def __init__(
        self, choices: ChoiceFormat, chat: ChatFormat, messages: Sequence[Mapping[str, Any]], tools: OfferedTools
    ) -> None:
        super().__init__(choices)
        self._chat, self._messages, self._tools = chat, messages, tools
        self._started: set[int] = set()

    def head(self, model: str, *, is_stream: bool) -> ResponseHead:
        return ResponseHead.of_chat(model, is_stream=is_stream)

    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        return self.choices.message(index, row, self._message(index, row))

    def _message(self, index: int, row: SampledRow) -> AssistantMessage:
        return self._chat.answer(
            row.token_ids,
            self.choices.text(index, row),
            prompt=self.choices.plan.prompts[0],
            messages=self._messages,
            tools=self._tools,
            complete=not row.truncated,
        )

    def _stable_text(self, state: RowDeltas, row: SampledRow) -> str:
        text = state.stable_text(row.token_ids)
        return self._chat.text_before_calls(text, self._tools) if self._tools else text

    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        choice = self.choices.message(index, new, message, key="delta")
        if index in self._started:
            del choice["delta"]["role"]
        self._started.add(index)
        return choice


class CompletionResponses:
    """Makes the responses of one model.

    Args:
        model: its name in the API.
        threads: decode completions.
    """

    def __init__(self, model: str, threads: TokenizerThreads) -> None:
        self._model, self._threads = model, threads

    async def whole(self, deltas: Deltas, rows: Mapping[int, SampledRow]) -> dict[str, Any]:
        """The body of a response with all completions."""
        found = await self._threads.run(lambda: [deltas.whole(index, row) for index, row in sorted(rows.items())])
        return deltas.head(self._model, is_stream=False).body(found, usage=usage(deltas.choices.plan, rows))

    async def events(
        self, deltas: Deltas, arrivals: AsyncGenerator[tuple[int, SampledRow], None], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The events of completions that arrive, each with all of its tokens so far.

        Raises:
            ApiError: as `Deltas.choice` and `arrivals`.
        """
        head = deltas.head(self._model, is_stream=True)
        rows: dict[int, SampledRow] = {}
        async with aclosing(arrivals):
            async for index, row in arrivals:
                rows[index] = row
                # Only the end of a completion is decoded from its first token, so only that is done in a thread.
                new = await self._threads.run(deltas.choice, index, row) if row.is_finished else deltas.choice(index, row)
                if new is not None:
                    yield server_sent_event(head.body([new]))
        if has_usage:
            yield server_sent_event(head.body([], usage=usage(deltas.choices.plan, rows)))
        yield DONE
