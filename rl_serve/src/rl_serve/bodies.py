"""Reads the bodies of requests: their size and nesting are limited, and large ones do not delay other requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from rl_core.event_loop import in_thread
from rl_serve.errors import ApiError

_LARGE_BYTES = 2**15
"""Bodies of this size or more are read in a thread; smaller ones take less time than starting it."""
_MAX_PROBLEMS = 10
"""Number of problems of a body that are reported."""
_MAX_CONTAINERS = 100_000
"""Number of arrays and objects of a body, whose memory is many times that of their text."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAY_BE_INFINITE = re.compile(rb"[0-9][eE]\+?0*[1-9][0-9]{2}|[0-9]{300}")


class BodyRoute(APIRoute):
    """A route whose handler has the parameters `body`, a Pydantic model, and `request`, and that returns a response.

    Large bodies are read one after the other, so that the event loop, which has to wait for Python's lock while one is parsed,
    answers other requests in between.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[..., Awaitable[Response]] = self.endpoint
        model: type[BaseModel] = get_type_hints(handler)["body"]
        one_at_a_time = asyncio.Semaphore()

        async def handle(request: Request) -> Response:
            try:
                content = await request.body()
            except ClientDisconnect as error:
                raise ApiError(499, "The client closed the connection.") from error
            read = partial(read_body, model, content, request.headers.get("content-type", ""))
            if len(content) < _LARGE_BYTES:
                return await handler(body=read(), request=request)
            async with one_at_a_time:
                body = await in_thread(read, name="rl-serve-body")
            return await handler(body=body, request=request)

        return handle


def read_body(model: type[BaseModel], content: bytes, content_type: str) -> BaseModel:
    """Parse and validate a body.

    Args:
        model: its model.
        content: the body, JSON of at most 200 levels.
        content_type: the header; anything but JSON is not parsed.

    Raises:
        ApiError: it is not JSON, or has too many arrays and objects.
        RequestValidationError: it does not fit the model.
    """
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and kind.removeprefix("application/").rpartition("+")[2] == "json"
    if _containers(content) > _MAX_CONTAINERS and _containers(_STRING.sub(b"", content)) > _MAX_CONTAINERS:
        raise ApiError(400, f"The body has more than {_MAX_CONTAINERS} arrays and objects.", code="invalid_body")
    try:
        value = from_json(content, allow_inf_nan=False, cache_strings="none") if content and is_json else None
        if _MAY_BE_INFINITE.search(content):
            json.dumps(value, allow_nan=False)
    except ValueError as error:
        hint = " NaN or Infinity are not JSON." if re.search(rb"NaN|Infinity|[eE]\+?[0-9]{3}", content) else ""
        raise ApiError(400, f"Invalid JSON: {error}.{hint}", code="invalid_body") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)[:_MAX_PROBLEMS]
        located = [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]
        raise RequestValidationError(located, body=value) from error


def _containers(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")
