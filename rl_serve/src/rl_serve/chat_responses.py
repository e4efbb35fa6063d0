"""Responses of chat and `/generate` that take several messages of the model: answers with code, and graded ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rl_serve.chat_service import Answer, ChatService, CompleteChat
from rl_serve.errors import ApiError
from rl_serve.requests import ChatRequest, ForwardedChatRequest
from rl_serve.responses import (
    DONE,
    EventStream,
    cancel_on_disconnect,
    errors_as_events,
    response_head,
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
        n = body.n or 1
        if n > self._limits.max_rows:
            raise ApiError(400, f"n={n} exceeds the {self._limits.max_rows} completions of a request.", param="n")
        if body.stream:
            return await self._stream(messages, [completer(index) for index in range(n)], body, request)

        async def one(index: int) -> tuple[dict[str, Any], Answer]:
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

        found = await cancel_on_disconnect(request, _gathered([one(index) for index in range(n)]))
        choices, answers = zip(*found, strict=True)
        return JSONResponse(
            {**response_head("chat.completion", self._model), "choices": list(choices), "usage": _usage(answers)}
        )

    async def _stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        completers: Sequence[CompleteChat],
        body: ChatRequest | ForwardedChatRequest,
        request: Request,
    ) -> EventStream:
        """The events; an error before the first message of the model has its own status."""
        head = response_head("chat.completion.chunk", self._model)

        def event(index: int, delta: Mapping[str, Any], reason: str | None = None) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
            return server_sent_event({**head, "choices": [choice]})

        async def events() -> AsyncGenerator[str, None]:
            answers = []
            for index, complete in enumerate(completers):
                answers.append(answer := Answer())
                async with aclosing(self._service.stream(messages, complete)) as parts:
                    async for part in parts:
                        yield event(index, {"role": "assistant", "content": answer.add(part)})
                yield event(index, {}, answer.finish_reason)
            if body.has_usage:
                yield server_sent_event({**head, "choices": [], "usage": _usage(answers)})
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


async def _gathered(works: Sequence[Any]) -> list[Any]:
    """The results of all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    return token_counts(answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers))
