"""Responses in the form of OpenAI's API, streams of server-sent events, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rl_serve.errors import ApiError

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


def response_head(kind: str, model: str) -> dict[str, Any]:
    """The fields with which a response, or each chunk of a stream, begins: a fresh id, the kind of object, time and model."""
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    """`usage` of a response."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


DONE = "data: [DONE]\n\n"
"""The last event of a complete stream."""
_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that JSON does not escape, and at which some clients split lines."""


def server_sent_event(body: Mapping[str, Any]) -> str:
    """A JSON body as an event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False).translate(_LINE_BREAKS)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events. They are closed at its end, also if the client was gone before the first one; then `source` exits."""

    def __init__(
        self,
        events: AsyncGenerator[str, None] | AsyncGenerator[bytes, None],
        source: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._source = events, source or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._source, aclosing(self._events):
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
