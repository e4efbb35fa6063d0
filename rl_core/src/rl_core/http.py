"""An HTTP client for JSON services: retries with back-off, a concurrency limit, deadlines, and no secrets in messages.

Needs httpx: `pip install 'rl-core[http]'`. A client belongs to the event loop in which it is used.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rl_core.errors import ConfigError, RLCoreError

_log = logging.getLogger(__name__)
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_EXCERPT = 300
_REMOVED = "[secret]"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HEADER_VALUE = re.compile(r"([!-~]([ -~\t]*[!-~])?)?")


class HttpError(RLCoreError):
    """A request failed; names the service, the number of attempts and the last reason, without secrets.

    Attributes:
        status: the last status; None if there was no response.
        is_temporary: whether a later attempt may succeed, such as after a timeout or status 503.
        body: the text of the last response, without secrets; empty if there was none.
    """

    def __init__(self, message: str, *, status: int | None, is_temporary: bool, body: str = "") -> None:
        super().__init__(message)
        self.status, self.is_temporary, self.body = status, is_temporary, body


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of the requests of one client."""

    concurrency: int = 16
    """Maximum number of requests at the same time."""
    timeout_s: float = 60.0
    """Timeout of one attempt, in seconds."""
    deadline_s: float = 300.0
    """Timeout of a request with all its attempts and the pauses between them, in seconds, without the wait for its turn."""
    max_retries: int = 4
    """Maximum number of further attempts after one that failed temporarily."""
    backoff_s: float = 0.5
    """Pause before the first retry, in seconds; doubled for each further one, with a random factor from 0.5 to 1."""
    max_backoff_s: float = 30.0
    """Longest pause, unless the server requests a longer one (`Retry-After`)."""
    max_response_bytes: int = 64 * 2**20
    """Maximum size of a response; the connection of a larger one is closed."""


@dataclass(frozen=True, kw_only=True)
class JsonResponse:
    """A successful response."""

    status: int
    body: Any
    """The decoded JSON."""
    attempts: int


@dataclass(frozen=True)
class _Failure:
    reason: str
    status: int | None
    is_temporary: bool
    retry_after_s: float = 0.0
    body: str = ""


@dataclass(frozen=True, kw_only=True)
class HttpClient:
    """Sends JSON requests to one service.

    Attributes:
        base_url: such as `http://localhost:8000/v1`, without user name, password and query.
        api_key: sent as a bearer token; removed from every message.
        headers: further headers, whose values are removed from messages too.
        limits: concurrency, timeouts and retries.
        sleep: the pause between attempts.

    Raises:
        ConfigError: httpx is not installed, the URL is not such a URL, or the API key or a header cannot be sent. The values
            are not shown, because they may have a secret.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    limits: RequestLimits = field(default_factory=RequestLimits)
    sleep: Callable[[float], Any] = field(default=asyncio.sleep, repr=False)
    _client: Any = field(init=False, repr=False)
    _turn: asyncio.Semaphore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(f"HTTP requests need httpx ({error}): pip install 'rl-core[http]'.") from error
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("`base_url` is not an HTTP URL. Write it as http://host:port/v1.")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                "`base_url` has a user name, a password, a query or a fragment, which logs would show. Write it as "
                "http://host:port/v1, and pass secrets as `api_key` or as headers."
            )
        headers = dict(self.headers) | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        for name, value in headers.items():
            if not _HEADER_VALUE.fullmatch(value):
                what = "The API key" if name == "Authorization" and self.api_key else f"The value of the header {name!r}"
                raise ConfigError(
                    f"{what} has a control character, a character that is not ASCII, or a space at an end. It is not shown, "
                    "because it may be secret. Remove the character; a key read from a file often ends with a line break."
                )
        limits = httpx.Limits(max_connections=self.limits.concurrency)
        client = httpx.AsyncClient(headers=headers, timeout=self.limits.timeout_s, limits=limits)
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_turn", asyncio.Semaphore(self.limits.concurrency))

    async def post_json(self, path: str, body: Mapping[str, Any]) -> JsonResponse:
        """Send a body as JSON and return the decoded response; waits while too many requests are in flight.

        Args:
            path: appended to the base URL, such as `chat/completions`.
            body: the request.

        Raises:
            HttpError: all attempts failed, the deadline passed, or the service refused the request.
        """
        return await self._request("POST", path, body)

    async def get_json(self, path: str) -> JsonResponse:
        """Like `post_json`, with the method GET and no body."""
        return await self._request("GET", path, None)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> JsonResponse:
        async with self._turn:
            started = time.monotonic()
            for attempt in range(1, self.limits.max_retries + 2):
                left = self.limits.deadline_s - (time.monotonic() - started)
                outcome = await self._attempt(method, path, body, timeout_s=min(left, self.limits.timeout_s))
                seconds = time.monotonic() - started
                if isinstance(outcome, tuple):
                    return JsonResponse(status=outcome[0], body=outcome[1], attempts=attempt)
                failure, pause = outcome, self._pause(outcome, attempt)
                if not failure.is_temporary or attempt > self.limits.max_retries or seconds + pause >= self.limits.deadline_s:
                    break
                _log.info("%s: attempt %d failed (%s); next attempt in %.1f s", self.base_url, attempt, failure.reason, pause)
                await self.sleep(pause)
        tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        raise HttpError(
            f"{method} {self.base_url.rstrip('/')}/{path} failed after {tries} in {seconds:.1f} s: {failure.reason}",
            status=failure.status,
            is_temporary=failure.is_temporary,
            body=failure.body,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> _Failure | tuple[int, Any]:
        import httpx

        request = self._client.build_request(method, f"{self.base_url.rstrip('/')}/{path}", json=body)
        try:
            # A limit on the whole attempt: httpx limits each read, so a server that sends byte after byte would never time out.
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(request, stream=True)
                content = await self.read(response)
        except (TimeoutError, httpx.TimeoutException):
            return _Failure(f"no response within {timeout_s:.1f} s", None, True)
        except Exception as error:  # httpx lets through what breaks below it, such as AttributeError if a connection is lost
            return _Failure(self.redact(f"{type(error).__name__}: {error}"), None, True)
        status = response.status_code
        if content is None:
            return _Failure(f"a response of more than {self.limits.max_response_bytes} bytes", status, False)
        text = self.redact(content.decode(errors="replace"))
        if not response.is_success:
            reason = _refusal(f"status {status}", text)
            is_busy = status == 409 and "retry-after" in response.headers  # such as for a lock; others are refusals
            return _Failure(reason, status, is_busy or status in _RETRIED, _retry_after(response.headers), text)
        try:
            return status, _decoded(content)
        except (ValueError, RecursionError):
            return _Failure(_refusal("a response that is not JSON", text), status, False)

    async def read(self, response: Any) -> bytes | None:
        """The content of a streamed `httpx.Response`, which is closed; None if it is too large."""
        content = bytearray()
        try:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > self.limits.max_response_bytes:
                    return None
        finally:
            await response.aclose()
        return bytes(content)

    def redact(self, text: str) -> str:
        """A text without the API key and the values of the headers."""
        for secret in (self.api_key, *self.headers.values()):
            text = text.replace(secret, _REMOVED) if secret else text
        return text

    def _pause(self, failure: _Failure, attempt: int) -> float:
        longest: float = min(self.limits.backoff_s * 2.0 ** (attempt - 1), self.limits.max_backoff_s)
        return max(failure.retry_after_s, longest * random.uniform(0.5, 1.0))


def _refusal(what: str, text: str) -> str:
    text = " ".join(text.split())
    return f"{what}: {text[:_EXCERPT]}{'...' if len(text) > _EXCERPT else ''}" if text else what


def _decoded(content: bytes) -> Any:
    """The JSON value of a response.

    Raises:
        ValueError: it is not JSON, or a string in it cannot be encoded.
        RecursionError: it is nested too deeply.
    """
    text = content.decode("utf-8-sig")
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait, given as a number or a date; 0.0 if it does not ask."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        parsed = email.utils.parsedate_tz(value)
        return 0.0 if parsed is None else max(0.0, float(email.utils.mktime_tz(parsed)) - time.time())
