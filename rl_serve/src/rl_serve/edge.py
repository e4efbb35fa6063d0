"""The edge of the server: its socket, HTTP connections, API keys, and limits of requests.

What uvicorn does not do is done here: an error in JSON for each refused request, limits on headers that arrive in one piece, on
bodies, and on the time that a client takes to send headers and body and to read the response.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_type_hints

import h11
import uvicorn
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_core.errors import ConfigError
from rl_core.event_loop import in_thread
from rl_serve.errors import ApiError
from rl_serve.sampling import MAX_HEADER_BYTES, Limits
from rl_train.errors import lost_interrupts

_OPEN_PATHS = ("/health",)
_RETRY_AFTER_S = 1
_READ_BYTES = 64 * 1024
"""Bytes of the body of a rejected request that are read before the response."""
_READ_S = 5.0
"""Time in which they are read, in seconds."""
_LARGE_BYTES = 2**15
"""Bodies of this size or more are read in a thread; smaller ones take less time than starting it."""
_MAX_PROBLEMS = 10
"""Number of problems of a body that are reported."""
_MAX_CONTAINERS = 100_000
"""Number of arrays and objects of a body, whose memory is many times that of their text."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MAY_BE_INFINITE = re.compile(rb"[0-9][eE]\+?0*[1-9][0-9]{2}|[0-9]{300}")
API_KEYS = "RLCORE_SERVE_API_KEYS"
"""Environment variable with the accepted keys, separated by commas."""
_DRAIN_S = 30
"""Seconds that running requests may take after SIGTERM."""
KEEP_ALIVE_S = 65
"""Seconds that idle connections stay open. Longer than clients keep them, so that no client uses one that is being closed."""
Check = Callable[[Scope], object]
"""Raises ApiError for a request that is refused before its body is read."""


class LimitsMiddleware:
    """ASGI middleware that applies limits to every request, and checks in their order."""

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
                text = f"The body was not complete after {self._limits.body_timeout_s:g} s."
                refusal = ApiError(408, text, code="request_timeout")
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


class SlowReaderError(Exception):
    """A client does not read its response."""


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


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens, and who may use it."""

    host: str
    port: int
    api_keys: Sequence[str] = field(repr=False)

    @classmethod
    def of(cls, host: str, port: int) -> Address:
        """The address, with the API keys of the environment.

        Raises:
            ConfigError: other machines can reach the address, and there are no keys.
        """
        keys = [key.strip() for key in os.environ.get(API_KEYS, "").split(",") if key.strip()]
        if not keys and not is_loopback(host):
            raise ConfigError(
                f"--host {host} is reachable from other machines, so API keys are required. Set {API_KEYS}, or listen on "
                "127.0.0.1."
            )
        return cls(host=host, port=port, api_keys=keys)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit with code 143 on SIGTERM while the block runs, so that what it has started is shut down.

    A second SIGTERM ends the process at once. The HTTP server handles the signal while it runs, and passes it on when its
    requests have finished.
    """
    is_stopped = is_again = False

    def stop(*_: object) -> None:
        nonlocal is_stopped, is_again
        if is_stopped and not is_again:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        is_stopped, is_again = True, False
        raise KeyboardInterrupt  # unlike SystemExit, not taken for an error of a model that is loaded in this process

    def stop_again() -> None:
        nonlocal is_again
        is_again = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        with lost_interrupts(stop_again):
            yield
    except BaseException:  # libraries convert the interruption to other errors
        if is_stopped:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A bound socket, closed at the end.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, port = address.host, address.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror}. Choose another port.") from error
        yield listener


def run_server(app: Any, listener: socket.socket, address: Address, *, name: str) -> None:
    """Serve `name` until SIGTERM or Ctrl-C; running requests then have 30 seconds to finish."""
    found = replace(address, port=listener.getsockname()[1])
    _Server(server_config(app), f"serving {name} on {found.url}/v1").run(sockets=[listener])


class _Server(uvicorn.Server):
    """Prints a message once it accepts connections and handles signals: either may follow as soon as the message is read."""

    def __init__(self, config: uvicorn.Config, message: str) -> None:
        super().__init__(config)
        self._message = message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._message, flush=True)


def server_config(app: Any, *, drain_s: int = _DRAIN_S) -> uvicorn.Config:
    """The settings of an HTTP server with limits on headers and idle connections, and on the time of requests after its end."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=TimedHttp,
        ws="none",
    )


class TimedHttp(H11Protocol):
    """HTTP connections that are closed if a request's headers do not arrive in time; uvicorn waits for them without a limit."""

    headers_timeout_s = 30.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.headers_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self.transport.close()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
