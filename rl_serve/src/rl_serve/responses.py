"""Bodies of responses, in the form of OpenAI's API.

Responses as server-sent events, which release what they use, and work that is cancelled when its client disconnects.

The text of a completion while it is sampled: only characters that later tokens cannot change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rl_core.data.tokenizer import decode
from rl_serve.chat_format import AssistantMessage
from rl_serve.engine import SampledRow
from rl_serve.errors import ApiError
from rl_serve.sampling import SamplingPlan
from rl_train.data.special_tokens import decode_answers, hidden_tokens


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """Fields that all chunks of a response share."""

    id: str
    kind: str
    model: str
    created: int

    @classmethod
    def of_chat(cls, model: str, *, is_stream: bool) -> ResponseHead:
        """A head of `/v1/chat/completions` with a fresh id."""
        return cls._new("chatcmpl", "chat.completion.chunk" if is_stream else "chat.completion", model)

    @classmethod
    def of_completions(cls, model: str) -> ResponseHead:
        """A head of `/v1/completions`, which is the same for streams, with a fresh id."""
        return cls._new("cmpl", "text_completion", model)

    @classmethod
    def _new(cls, prefix: str, kind: str, model: str) -> ResponseHead:
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", kind=kind, model=model, created=int(time.time()))

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """The body of a response, or of one chunk of a stream."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def usage(plan: SamplingPlan, rows: Mapping[int, SampledRow]) -> dict[str, int]:
    """Token counts; a prompt counts once."""
    prompt = sum(len(prompt) for prompt in plan.prompts)
    return token_counts(prompt, sum(len(row.token_ids) for row in rows.values()))


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    """`usage` of a response."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(frozen=True, kw_only=True)
class ChoiceFormat:
    """How completions become choices.

    Attributes:
        tokenizer: decodes tokens.
        plan: the request's rows.
        logprobs: whether choices have log-probabilities.
        top_logprobs: whether they have those of the most likely tokens at each position.
        token_ids: whether choices have token ids.
    """

    tokenizer: Any
    plan: SamplingPlan
    logprobs: bool = False
    top_logprobs: bool = False
    token_ids: bool = False

    @property
    def shows_tokens(self) -> bool:
        """Whether choices contain token ids or log-probabilities."""
        return self.logprobs or self.token_ids

    def text(self, index: int, row: SampledRow) -> str:
        """The text of a completion, without hidden special tokens and without the stop string that ended it."""
        return cut_at_stop(decoded(self.tokenizer, row.token_ids), self.plan.rows[index].stop_strings)

    def completion(self, index: int, row: SampledRow, *, text: str | None = None, offset: int = 0) -> dict[str, Any]:
        """A choice of `/v1/completions`; in a stream, with the new tokens, the new text and the number of characters before."""
        choice = {"index": index, "text": self.text(index, row) if text is None else text, **self._common(index, row)}
        if self.logprobs:
            tokens = token_texts(self.tokenizer, row.token_ids, before=row.before)
            *offsets, _ = accumulate(map(len, tokens), initial=offset)
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": row.logprobs,
                "top_logprobs": self._likely_texts(row),
                "text_offset": offsets,
            }
        return choice

    def message(self, index: int, row: SampledRow, message: AssistantMessage, *, key: str = "message") -> dict[str, Any]:
        """A choice of `/v1/chat/completions`; in a stream, `key` is "delta", and calls are numbered."""
        written = message.as_openai()
        choice = {"index": index, key: written, **self._common(index, row)}
        if message.tool_calls:
            choice["finish_reason"] = "tool_calls"
            if key == "delta":
                written["tool_calls"] = [{"index": number, **call} for number, call in enumerate(written["tool_calls"])]
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

    def _likely_texts(self, row: SampledRow) -> list[dict[str, float]] | None:
        """Text to log-probability of the most likely tokens; the first of those with equal texts (parts of characters)."""
        if not self.top_logprobs:
            return None
        return [{text: logprob for _, text, logprob in reversed(likely)} for likely in self._likely(row)]

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
                common["prompt_token_ids"] = self.plan.prompts[index // self.plan.n]
        return common


_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
DONE = "data: [DONE]\n\n"
"""The last event of a complete stream."""
_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that JSON does not escape, and at which some clients split lines."""


def server_sent_event(body: Mapping[str, Any]) -> str:
    """A JSON body as an event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False).translate(_LINE_BREAKS)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events.

    Args:
        events: the events; closed at the end, also if the client was gone before the first one.
        exits: closed after them.
    """

    def __init__(
        self, events: AsyncGenerator[str, None] | AsyncGenerator[bytes, None], exits: AsyncExitStack | None = None
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exits = AsyncExitStack() if exits is None else exits
        self._exits.push_async_callback(events.aclose)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exits:
            await super().__call__(scope, receive, send)


async def errors_as_events(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events, and an event with the error that ended them: the status was already sent."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except ApiError as error:
            yield server_sent_event(error.body())
        except Exception:
            _log.exception("a stream failed")
            yield server_sent_event(ApiError(500, "The server failed. Its log has the details.").body())


async def cancel_on_disconnect(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled if the client closes its connection.

    Raises:
        ApiError: the client closed the connection; this response is not read.
    """
    working = asyncio.ensure_future(work)
    hanging_up = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client closed the connection.")
        return working.result()
    finally:
        for task in (working, hanging_up):
            task.cancel()
        await asyncio.gather(working, hanging_up, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token of one byte, in vocabularies that write unknown characters as bytes."""
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF_LETTER: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
"""The byte of each letter in byte-level vocabularies, as those of GPT-2 and its successors."""
_CONTEXT_TOKENS: Final = 8
"""Number of tokens that are decoded again with each new one, so that spaces and characters between tokens are correct."""
_WINDOW_TOKENS: Final = 64
"""Number of tokens after which the decoded window is shortened, so that long completions are not decoded from their start."""


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a completion, without the special tokens that are hidden."""
    [text] = decode_answers(tokenizer, [token_ids])
    return text


def token_texts(tokenizer: Any, token_ids: Sequence[int], *, before: Sequence[int] = ()) -> list[str]:
    """The text of each token, with the space before a word; a part of a character is a replacement character.

    Args:
        tokenizer: a Transformers tokenizer.
        token_ids: sampled tokens.
        before: the tokens of the completion before them. The first word of a completion has no space in many vocabularies.
    """
    [*texts] = (text for [text] in candidate_texts(tokenizer, [[token] for token in token_ids], token_ids, before=before))
    return texts


def candidate_texts(
    tokenizer: Any, candidates: Sequence[Sequence[int]], token_ids: Sequence[int], *, before: Sequence[int] = ()
) -> list[list[str]]:
    """The texts of tokens that could have been sampled at each position, as `token_texts`.

    Args:
        tokenizer: a Transformers tokenizer.
        candidates: tokens at each position.
        token_ids: the sampled token at each position.
        before: the tokens of the completion before them.
    """
    hidden = hidden_tokens(tokenizer)
    begins = all(token in hidden for token in before)
    texts = []
    for tokens, sampled in zip(candidates, token_ids, strict=True):
        text_of = _first_text if begins else _inner_text
        texts.append([text_of(tokenizer, token) for token in tokens])
        begins = begins and sampled in hidden
    return texts


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """The bytes of a token, which may be a part of a character; None if the vocabulary does not show them.

    Args:
        tokenizer: a Transformers tokenizer.
        token: the token.
        text: its text, from `token_texts`.
    """
    if _REPLACEMENT not in text:
        return list(text.encode())
    name = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str):
        return None
    if _BYTE.fullmatch(name):
        return [int(name[3:5], 16)]
    if _REPLACEMENT in name:
        return list(text.encode())
    return [_BYTE_OF_LETTER[letter] for letter in name] if all(letter in _BYTE_OF_LETTER for letter in name) else None


@lru_cache(maxsize=2**16)
def _first_text(tokenizer: Any, token: int) -> str:
    return decode(tokenizer, [token])


@lru_cache(maxsize=2**16)
def _inner_text(tokenizer: Any, token: int) -> str:
    """The text that a token adds to one before it: decoders drop the space of the first word, also of a single token."""
    first = _first_text(tokenizer, token)
    twice = decode(tokenizer, [token, token])
    return twice[len(first) :] if _REPLACEMENT not in first and twice.startswith(first) else first


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [found for stop in stop_strings if (found := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def cut_at_possible_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string, or before an end that may be the beginning of one."""
    text = cut_at_stop(text, stop_strings)
    return text[: min((partial_start(text, stop) for stop in stop_strings), default=len(text))]


def partial_start(text: str, string: str) -> int:
    """Where an end of the text begins that is a beginning of `string` but not all of it; the text's length if none does."""
    first = max(len(text) - len(string) + 1, 0)
    return next((start for start in range(first, len(text)) if string.startswith(text[start:])), len(text))


class IncrementalText:
    """Decodes one completion as its tokens arrive.

    Args:
        tokenizer: a Transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden_tokens(tokenizer)
        self._before = ""
        self._start = 0

    def read(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens so far, up to the first character that may still change.

        Args:
            token_ids: all sampled tokens so far; each call has the tokens of the call before it and perhaps more.
        """
        end = len(token_ids)
        # One invalid byte turns its whole run of byte tokens into replacement characters, so a run is read when it has ended.
        # Hidden tokens do not end it: they are removed before bytes are joined.
        while end > self._start and self._continues_run(token_ids[end - 1]):
            end -= 1
        text = self._before + decoded(self._tokenizer, token_ids[self._start : end])
        if end - self._start > _WINDOW_TOKENS:
            self._shorten(token_ids[:end], text)
        return text.rstrip(_REPLACEMENT)

    def _shorten(self, token_ids: Sequence[int], text: str) -> None:
        """Decode only the last tokens from now on, if they have the same text alone as behind the others."""
        start = len(token_ids) - _CONTEXT_TOKENS
        context = decoded(self._tokenizer, token_ids[start:])
        if context.strip(_REPLACEMENT) and text.endswith(context) and not self._continues_run(token_ids[start]):
            self._before, self._start = text[: -len(context)], start

    def _continues_run(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return token in self._hidden or (isinstance(name, str) and _BYTE.fullmatch(name) is not None)
