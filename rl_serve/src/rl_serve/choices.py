"""The choices of a response: whole, or as deltas that together are the whole ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Final

from rl_serve.chat_format import AssistantMessage, ChatFormat, OfferedTools
from rl_serve.engine import SampledRow, TokenizerThreads
from rl_serve.errors import ApiError
from rl_serve.responses import DONE, response_head, server_sent_event, token_counts
from rl_serve.sampling import SamplingPlan
from rl_serve.text import IncrementalText, candidate_texts, completion_text, cut_at_possible_stop, token_bytes, token_texts


@dataclass(kw_only=True)
class Choices(ABC):
    """The choices of one response.

    Attributes:
        tokenizer: decodes tokens.
        plan: the request's rows.
        logprobs: whether choices have log-probabilities.
        top_logprobs: whether they have those of the most likely tokens at each position.
        token_ids: whether choices have token ids.
    """

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    tokenizer: Any
    plan: SamplingPlan
    logprobs: bool = False
    top_logprobs: bool = False
    token_ids: bool = False
    _rows: dict[int, RowDeltas] = field(default_factory=dict)

    async def response(self, rows: Mapping[int, SampledRow], *, model: str, threads: TokenizerThreads) -> dict[str, Any]:
        """The body of a response with all completions, which are decoded in a thread."""
        whole = await threads.run(lambda: [self.whole(index, row) for index, row in sorted(rows.items())])
        return {**response_head(self.whole_kind, model), "choices": whole, "usage": usage(self.plan, rows)}

    async def events(
        self,
        arrivals: AsyncGenerator[tuple[int, SampledRow], None],
        *,
        model: str,
        threads: TokenizerThreads,
        has_usage: bool,
    ) -> AsyncGenerator[str, None]:
        """The events of completions that arrive, each with all of its tokens so far.

        Raises:
            ApiError: as `delta` and `arrivals`.
        """
        head = response_head(self.chunk_kind, model)
        rows: dict[int, SampledRow] = {}
        async with aclosing(arrivals):
            async for index, row in arrivals:
                rows[index] = row
                # Only the end of a completion is decoded from its first token, so only that is done in a thread.
                new = await threads.run(self.delta, index, row) if row.is_finished else self.delta(index, row)
                if new is not None:
                    yield server_sent_event({**head, "choices": [new]})
        if has_usage:
            yield server_sent_event({**head, "choices": [], "usage": usage(self.plan, rows)})
        yield DONE

    @abstractmethod
    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        """The choice of a finished completion."""

    def delta(self, index: int, row: SampledRow) -> Mapping[str, Any] | None:
        """The delta of a completion that has new tokens or has ended; None if there is nothing to send yet.

        Raises:
            ApiError: the completion has changed, see `RowDeltas`.
        """
        if index not in self._rows:
            self._rows[index] = RowDeltas(self.tokenizer, self.plan.rows[index].stop_strings)
        state = self._rows[index]
        new = state.new_tokens(row)
        message = self._message(index, row) if row.is_finished else AssistantMessage(content=self._stable_text(state, row))
        text = state.new_text(message.content, is_finished=row.is_finished)
        if not (text or row.is_finished or self.logprobs or self.token_ids):
            return None
        return self._delta(index, new, replace(message, content=text))

    def _message(self, index: int, row: SampledRow) -> AssistantMessage:
        """The message of a finished completion."""
        return AssistantMessage(content=self.text(index, row))

    def _stable_text(self, state: RowDeltas, row: SampledRow) -> str:
        """The text of an unfinished completion that can be sent."""
        return state.stable_text(row.token_ids)

    @abstractmethod
    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        """The choice with the new tokens and the new part of the message."""

    def text(self, index: int, row: SampledRow) -> str:
        """The text of a finished completion."""
        return completion_text(self.tokenizer, row.token_ids, self.plan.rows[index].stop_strings)

    def _likely(self, row: SampledRow) -> list[list[tuple[int, str, float]]]:
        """The id, text and log-probability of the most likely tokens at each position; empty if they were not requested."""
        if not self.top_logprobs or row.top_logprobs is None:
            return [[] for _ in row.token_ids]
        candidates = [[token for token, _ in likely] for likely in row.top_logprobs]
        texts = candidate_texts(self.tokenizer, candidates, row.token_ids, before=row.before)
        return [
            [(token, text, logprob) for (token, logprob), text in zip(likely, of_position, strict=True)]
            for likely, of_position in zip(row.top_logprobs, texts, strict=True)
        ]

    def _common(self, index: int, row: SampledRow) -> dict[str, Any]:
        common: dict[str, Any] = {
            "finish_reason": ("length" if row.truncated else "stop") if row.is_finished else None,
            "logprobs": None,
            "weight_version": row.weight_version,
        }
        if self.token_ids:
            common["token_ids"] = row.token_ids
            if not row.before:
                common["prompt_token_ids"] = list(self.plan.rows[index].prompt)
        return common


def usage(plan: SamplingPlan, rows: Mapping[int, SampledRow]) -> dict[str, int]:
    """Token counts; a prompt counts once."""
    prompt = sum(len(row.prompt) for row in plan.rows[:: plan.n])
    return token_counts(prompt, sum(len(row.token_ids) for row in rows.values()))


_LEAST_LOGPROB: Final = -9999.0
"""Instead of an infinite one, which JSON cannot have, as in vLLM's API: a token of a prompt may have probability 0."""


@dataclass(kw_only=True)
class CompletionChoices(Choices):
    """The choices of `/v1/completions`.

    Attributes:
        echoed: text of each prompt, with which the texts of its choices begin, and the number of tokens before the text, which
            the server has added; empty for none.
        only_echo: whether choices have the prompt alone, without the token that the engine samples.
    """

    whole_kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    echoed: Sequence[tuple[str, int]] = ()
    only_echo: bool = False
    _offsets: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    async def response(self, rows: Mapping[int, SampledRow], *, model: str, threads: TokenizerThreads) -> dict[str, Any]:
        if self.only_echo:
            none: dict[str, Any] = {"token_ids": [], "logprobs": [], "top_logprobs": None, "truncated": True}
            rows = {index: replace(row, **none) for index, row in rows.items()}
        return await super().response(rows, model=model, threads=threads)

    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        return self._choice(index, row, self._echo(index) + self.text(index, row))

    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        echo = "" if index in self._offsets else self._echo(index)
        choice = self._choice(index, new, echo + message.content, offset=self._offsets[index])
        if self.logprobs:
            self._offsets[index] += sum(map(len, choice["logprobs"]["tokens"]))
        return choice

    def _echo(self, index: int) -> str:
        return self.echoed[index // self.plan.n][0] if self.echoed else ""

    def _choice(self, index: int, row: SampledRow, text: str, *, offset: int = 0) -> dict[str, Any]:
        """A choice; `offset` is the number of characters before the tokens."""
        choice = {"index": index, "text": text, **self._common(index, row)}
        if self.logprobs and row.prompt_logprobs is not None:
            choice["logprobs"] = self._echoed_logprobs(index, row, row.prompt_logprobs)
        elif self.logprobs:
            tokens = token_texts(self.tokenizer, row.token_ids, before=row.before)
            *offsets, _ = accumulate(map(len, tokens), initial=offset)
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": row.logprobs,
                "top_logprobs": self._likely_texts(row),
                "text_offset": offsets,
            }
        return choice

    def _echoed_logprobs(self, index: int, row: SampledRow, scores: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
        """`logprobs` of prompt and completion; null for the first token, and the likely ones of the prompt with the token."""
        prompt, (_, added) = self.plan.rows[index].prompt, self.echoed[index // self.plan.n]
        # The token itself comes last: another one with the same text, a part of a character, has at least its probability.
        likely = [[*others, *own] for own, others in ((scored[:1], scored[1:]) for scored in scores)]
        whole = replace(
            row,
            token_ids=[*prompt, *row.token_ids],
            top_logprobs=[*likely, *(row.top_logprobs or [[] for _ in row.token_ids])],
        )
        tokens, texts = token_texts(self.tokenizer, whole.token_ids), self._likely_texts(whole)
        lengths = [0 if number < added else len(token) for number, token in enumerate(tokens)]
        return {
            "tokens": tokens,
            "token_logprobs": [None, *(max(scored[0][1], _LEAST_LOGPROB) for scored in scores[1:]), *row.logprobs],
            "top_logprobs": None if texts is None else [None, *texts[1:]],
            "text_offset": list(accumulate(lengths, initial=0))[:-1],
        }

    def _likely_texts(self, row: SampledRow) -> list[dict[str, float]] | None:
        """Text to log-probability of the most likely tokens; the first of those with equal texts (parts of characters)."""
        if not self.top_logprobs:
            return None
        return [{text: max(x, _LEAST_LOGPROB) for _, text, x in reversed(likely)} for likely in self._likely(row)]


@dataclass(kw_only=True)
class ChatChoices(Choices):
    """The choices of `/v1/chat/completions`. A stream has text up to the first tool call, and calls in complete messages.

    Attributes:
        chat: the model's chat format.
        messages: the conversation.
        tools: the functions that the model was shown.
    """

    whole_kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    chat: ChatFormat
    messages: Sequence[Mapping[str, Any]]
    tools: OfferedTools
    _started: set[int] = field(default_factory=set)

    def whole(self, index: int, row: SampledRow) -> dict[str, Any]:
        return self._choice(index, row, "message", self._message(index, row))

    def _message(self, index: int, row: SampledRow) -> AssistantMessage:
        return self.chat.answer(
            row.token_ids,
            self.text(index, row),
            prompt=self.plan.rows[index].prompt,
            messages=self.messages,
            tools=self.tools,
            complete=not row.truncated,
        )

    def _stable_text(self, state: RowDeltas, row: SampledRow) -> str:
        text = state.stable_text(row.token_ids)
        return self.chat.text_before_calls(text, self.tools) if self.tools else text

    def _delta(self, index: int, new: SampledRow, message: AssistantMessage) -> dict[str, Any]:
        choice = self._choice(index, new, "delta", message)
        delta = choice["delta"]
        if message.tool_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        if index in self._started:
            del delta["role"]
        self._started.add(index)
        return choice

    def _choice(self, index: int, row: SampledRow, key: str, message: AssistantMessage) -> dict[str, Any]:
        choice = {"index": index, key: message.as_openai(), **self._common(index, row)}
        if message.tool_calls:
            choice["finish_reason"] = "tool_calls"
        if self.logprobs:
            choice["logprobs"] = {"content": self.token_logprobs(row), "refusal": None}
        return choice

    def token_logprobs(self, row: SampledRow) -> list[dict[str, Any]]:
        """The sampled tokens with their log-probabilities."""
        texts = token_texts(self.tokenizer, row.token_ids, before=row.before)
        sampled = zip(row.token_ids, texts, row.logprobs, self._likely(row), strict=True)
        return [
            {**self._scored(token, text, logprob), "top_logprobs": [self._scored(*each) for each in likely]}
            for token, text, logprob, likely in sampled
        ]

    def _scored(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "token_id": token, "logprob": logprob, "bytes": token_bytes(self.tokenizer, token, text)}


class RowDeltas:
    """What is new in one completion, whose text ends at stop strings, each time that it arrives."""

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
