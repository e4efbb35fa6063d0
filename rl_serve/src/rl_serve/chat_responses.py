"""Responses of chat and `/generate` that take several messages of the model: answers with code, and graded ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rl_serve.chat_service import ChatService, CompleteChat, Completion, Transcript
from rl_serve.errors import ApiError
from rl_serve.requests import ChatRequest, ForwardedChatRequest
from rl_serve.responses import (
    DONE,
    EventStream,
    ResponseHead,
    cancel_on_disconnect,
    errors_as_events,
    server_sent_event,
    token_counts,
)
from rl_serve.sampling import Limits

_PER_MESSAGE = ("tools", "logprobs", "top_logprobs", "return_token_ids", "response_format", "continue_final_message")


def refuse_with_code(body: Mapping[str, Any]) -> None:
    """Refuse fields about single messages, which an answer with code consists of.

    Raises:
        ApiError: names the first.
    """
    for name in _PER_MESSAGE:
        if body.get(name) and body[name] != {"type": "text"}:
            raise ApiError(
                400,
                f"{name} cannot be used, because this server runs code (code_execution): an answer has several messages.",
                param=name,
                code="unsupported_parameter",
            )


class ChatResponses:
    """Makes the responses.

    Args:
        service: fills prompts, runs code and grades.
        limits: the server's limits.
        model: name of the model in the API.
    """

    def __init__(self, service: ChatService, limits: Limits, model: str) -> None:
        self._service, self._limits, self._model = service, limits, model

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat, record: Mapping[str, Any], request: Request
    ) -> Response:
        """The response of `/generate`."""

        async def work() -> dict[str, Any]:
            answer = await self._service.answer(messages, complete)
            rounds = {} if self._service.code is None else {"code_rounds": answer.code_rounds}
            return {
                "generation": answer.text,
                "num_generated_tokens": answer.completion_tokens,
                "finish_reason": answer.finish_reason,
                **rounds,
                **await self._service.grade(messages, answer.last, record),
            }

        return JSONResponse(await cancel_on_disconnect(request, work()))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        completer: Callable[[int], CompleteChat],
        body: ChatRequest | ForwardedChatRequest,
        request: Request,
    ) -> Response:
        """A chat completion or its stream, which has an event for each message and each output."""
        if (body.n or 1) > self._limits.max_rows:
            raise ApiError(400, f"n={body.n} exceeds the {self._limits.max_rows} completions of a request.", param="n")
        if body.stream:
            return await self._stream(messages, completer, body, request)
        found = await cancel_on_disconnect(request, self._choices(messages, completer, body))
        head = ResponseHead.of_chat(self._model, is_stream=False)
        return JSONResponse(head.body([choice for choice, _ in found], usage=_usage([answer for _, answer in found])))

    async def _choices(
        self,
        messages: Sequence[Mapping[str, Any]],
        completer: Callable[[int], CompleteChat],
        body: ChatRequest | ForwardedChatRequest,
    ) -> list[tuple[dict[str, Any], Transcript]]:
        async def one(index: int) -> tuple[dict[str, Any], Transcript]:
            answer = await self._service.answer(messages, completer(index))
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
                "logprobs": None,
                "code_rounds": answer.code_rounds,
                **await self._service.grade(messages, answer.last, body.record()),
            }
            return choice, answer

        return await _gathered([one(index) for index in range(body.n or 1)])

    async def _stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        completer: Callable[[int], CompleteChat],
        body: ChatRequest | ForwardedChatRequest,
        request: Request,
    ) -> EventStream:
        """The events; an error before the first message of the model has its own status."""
        head = ResponseHead.of_chat(self._model, is_stream=True)
        completions: list[Completion] = []

        async def events() -> AsyncGenerator[str, None]:
            for index in range(body.n or 1):
                async with aclosing(self._deltas(messages, completer(index), completions)) as deltas:
                    async for delta, reason in deltas:
                        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
                        yield server_sent_event(head.body([choice]))
            if body.has_usage:
                sampled = sum(completion.completion_tokens for completion in completions)
                yield server_sent_event(head.body([], usage=token_counts(completions[0].prompt_tokens, sampled)))
            yield DONE

        made = events()
        exits = AsyncExitStack()
        exits.push_async_callback(made.aclose)

        try:
            first = await cancel_on_disconnect(request, anext(made))
        except BaseException:
            await exits.aclose()
            raise

        async def all_events() -> AsyncGenerator[str, None]:
            yield first
            async for event in made:
                yield event

        return EventStream(errors_as_events(all_events()), exits)

    async def _deltas(
        self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat, completions: list[Completion]
    ) -> AsyncGenerator[tuple[dict[str, Any], str | None], None]:
        separator, reason = "", "length"
        async with aclosing(self._service.stream(messages, complete)) as parts:
            async for part in parts:
                text = part if isinstance(part, str) else part.content
                yield {"role": "assistant", "content": f"{separator}{text}"}, None
                separator, reason = "\n\n", "length" if isinstance(part, str) else part.finish_reason
                completions += [] if isinstance(part, str) else [part]
        yield {}, reason


async def _gathered(works: Sequence[Any]) -> list[Any]:
    """The results of all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(answers: Sequence[Transcript]) -> dict[str, int]:
    return token_counts(answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers))
