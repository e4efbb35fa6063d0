"""Checks every request before FastAPI sees it: API key, size of the body, number of requests at the same time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_serve.errors import ApiError
from rl_serve.sampling import Limits

_OPEN_PATHS = ("/health",)
_RETRY_AFTER_S = 1
_READ_BYTES = 64 * 1024
"""Bytes of the body of a rejected request that are read before the response."""


class Gate:
    """ASGI middleware.

    Args:
        app: the application.
        limits: the server's limits.
        api_keys: accepted keys; without any, requests need no key.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, api_keys: Sequence[str] = ()) -> None:
        self._app, self._limits = app, limits
        self._keys = [key.encode() for key in api_keys]
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length"))
            is_sampling = scope["method"] == "POST"
            if is_sampling and self._running >= self._limits.max_concurrent_requests:
                raise ApiError(
                    429,
                    f"The server already runs {self._running} requests. Try again in {_RETRY_AFTER_S} s.",
                    code="too_many_requests",
                    headers={"Retry-After": str(_RETRY_AFTER_S)},
                )
        except ApiError as error:
            await _read_rest(receive)
            await error.response()(scope, receive, send)
            return
        self._running += is_sampling
        try:
            await self._forward(scope, receive, send)
        finally:
            self._running -= is_sampling

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0
        has_started = False

        def is_too_large() -> bool:
            return received > self._limits.max_body_bytes

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if is_too_large():
                raise self._too_large()
            return message

        async def watched(message: Message) -> None:
            # FastAPI turns an exception of `limited` into another response, which is dropped.
            nonlocal has_started
            if has_started or not is_too_large():
                has_started = True
                await send(message)

        with suppress(ApiError):
            await self._app(scope, limited, watched)
        if is_too_large() and not has_started:
            await self._too_large().response()(scope, receive, send)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self._keys or path in _OPEN_PATHS:
            return
        scheme, _, given = authorization.partition(b" ")
        # All keys are compared, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "A valid API key is required: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_length(self, length: bytes | None) -> None:
        if length is not None and length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes.", code="request_too_large")


async def _read_rest(receive: Receive) -> None:
    """Read a body: if a connection is closed with unread data, the client may lose the response."""
    received = 0
    while received < _READ_BYTES:
        message = await receive()
        received += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
