"""Checks every request before FastAPI sees it: sender, size, number of requests at the same time, and slow clients."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_serve.errors import ApiError
from rl_serve.listening import is_loopback
from rl_serve.sampling import Limits

_OPEN_PATHS = ("/health",)
_RETRY_AFTER_S = 1
_READ_BYTES = 64 * 1024
"""Bytes of the body of a rejected request that are read before the response."""
_READ_S = 5.0
"""Time in which they are read, in seconds."""
Check = Callable[[Scope], None]
"""Raises ApiError for a request that is refused before its body is read."""


class LimitsMiddleware:
    """ASGI middleware.

    Args:
        app: the application.
        limits: the server's limits.
        checks: called in order for every request.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, checks: Sequence[Check] = ()) -> None:
        self._app, self._limits, self._checks = app, limits, checks
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_sampling = scope["method"] == "POST"
        try:
            for check in self._checks:
                check(scope)
            self._check_headers(scope)
            self._check_length(header_of(scope, b"content-length"))
            if is_sampling and self._running >= self._limits.max_concurrent_requests:
                raise ApiError(
                    429,
                    f"The server already runs {self._running} requests. Try again in {_RETRY_AFTER_S} s.",
                    code="too_many_requests",
                    headers={"Retry-After": str(_RETRY_AFTER_S)},
                )
        except ApiError as error:
            if not await _read_rest(receive):
                error.close_connection()
            await error.response()(scope, receive, send)
            return
        self._running += is_sampling
        try:
            await self._forward(scope, receive, send)
        finally:
            self._running -= is_sampling

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, with limits on its body and on the time that its client takes."""
        body_until = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        received = 0
        refusal: ApiError | None = None
        is_complete = has_started = False

        async def limited() -> Message:
            nonlocal received, is_complete, refusal
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(body_until):
                    message = await receive()
            except TimeoutError:
                refusal = self._too_slow()
                raise refusal from None
            received += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if received > self._limits.max_body_bytes:
                refusal = self._too_large()
                raise refusal
            return message

        async def watched(message: Message) -> None:
            # FastAPI turns an exception of `limited` into another response, which is dropped.
            nonlocal has_started
            if has_started or refusal is None:
                has_started = True
                try:
                    async with asyncio.timeout(self._limits.read_timeout_s):
                        await send(message)
                except TimeoutError:
                    raise SlowReaderError from None

        # Without the rest of the response, uvicorn closes the connection.
        with suppress(ApiError, SlowReaderError):
            await self._app(scope, limited, watched)
        if refusal is not None and not has_started:
            await refusal.close_connection().response()(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        # The parser only limits headers that arrive in several pieces.
        address = len(scope["path"]) + len(scope["query_string"])
        if address + sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            raise ApiError(431, f"The headers and the path are larger than {most} bytes.", code="headers_too_large")

    def _check_length(self, length: bytes) -> None:
        # Longer numbers are not converted, which Python refuses for thousands of digits.
        if length.isdigit() and (len(length) > 20 or int(length) > self._limits.max_body_bytes):
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes.", code="request_too_large")

    def _too_slow(self) -> ApiError:
        return ApiError(408, f"The body was not complete after {self._limits.body_timeout_s:g} s.", code="request_timeout")


class SlowReaderError(Exception):
    """A client does not read its response."""


def key_check(keys: Sequence[str]) -> Check:
    """Accepts requests with one of some API keys."""
    accepted = [key.encode() for key in keys]

    def check(scope: Scope) -> None:
        if scope["path"] in _OPEN_PATHS:
            return
        given = bearer_key(scope)
        # All keys are compared, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(given, key) for key in accepted]
        if not given or not any(matches):
            raise ApiError(
                401,
                "A valid API key is required: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


def check_local_name(scope: Scope) -> None:
    """Accepts requests that name this machine as `localhost` or by a loopback address.

    A page of the web can have its own name resolve to the loopback address, and would then be allowed to read responses.
    """
    given = header_of(scope, b"host").decode("latin-1").strip().lower()
    name = given[1:].partition("]")[0] if given.startswith("[") else given.rpartition(":")[0] or given
    if given and not (is_loopback(name) or name.endswith(".localhost")):
        raise ApiError(
            403,
            f"The header Host is {given[:100]!r}: without API keys, this server only answers requests for localhost. Use "
            "http://localhost or http://127.0.0.1 as the URL, or start the server with API keys.",
            code="host_not_allowed",
        )


def bearer_key(scope: Scope) -> bytes:
    """The key of the header `Authorization: Bearer KEY`; empty if there is none."""
    scheme, _, given = header_of(scope, b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def header_of(scope: Scope, name: bytes) -> bytes:
    """The last value of a header; empty if the header is missing."""
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value


async def _read_rest(receive: Receive) -> bool:
    """Read a body: if a connection is closed with unread data, the client may lose the response. Returns whether it ended."""
    received = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_READ_S):
            while received < _READ_BYTES:
                message = await receive()
                received += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    return False
