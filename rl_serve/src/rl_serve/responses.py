"""Bodies of responses, in the form of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rl_serve.chat_format import AssistantMessage
from rl_serve.engine import SampledRow
from rl_serve.incremental_text import candidate_texts, cut_at_stop, decoded, token_bytes, token_texts
from rl_serve.sampling import SamplingPlan


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
