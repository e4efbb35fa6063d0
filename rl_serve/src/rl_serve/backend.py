"""The server that a proxy forwards requests to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rl_core.http import HttpClient, HttpError, RequestLimits
from rl_serve.errors import ApiError, model_not_found
from rl_serve.event_streams import server_sent_event
from rl_serve.settings import BackendSection

_RETRY_AFTER_S = 1
_CONNECT_S = 10.0


class Backend:
    """An OpenAI-compatible server.

    Args:
        section: its address.
        concurrency: maximum number of requests at the same time.
    """

    def __init__(self, section: BackendSection, *, concurrency: int) -> None:
        self.section = section
        limits = RequestLimits(
            concurrency=concurrency,
            timeout_s=section.timeout_s,
            deadline_s=section.timeout_s * (section.max_retries + 1),
            max_retries=section.max_retries,
        )
        self._client = _Client(base_url=section.url, api_key=section.api_key, limits=limits)
        root = section.url.removesuffix("/v1")
        self._root = _Client(base_url=root, api_key=section.api_key, limits=limits)
        self._names: list[str] = []

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._root.close()

    async def names(self) -> list[str]:
        """The names of the backend's models.

        Raises:
            ApiError: the backend does not answer.
        """
        found = await self._client.get_once("models")
        data = found.get("data") if isinstance(found, Mapping) else None
        self._names = [str(entry["id"]) for entry in data or () if isinstance(entry, Mapping) and "id" in entry]
        return self._names

    async def check(self) -> None:
        """Check that the backend answers.

        Raises:
            ApiError: it does not.
        """
        if self.section.server_type == "vllm":
            await self._root.get_once("health", is_json=False)
        else:
            await self._client.get_once("models")

    async def model_for(self, asked: str | None, name: str) -> str:
        """The backend's name of a requested model.

        Args:
            asked: the requested name.
            name: the proxy's own name, which stands for the backend's model.

        Raises:
            ApiError: there is no such model, or the backend does not answer.
        """
        own = self.section.model
        if asked in (None, name) and own is not None:
            return own
        known = [own] if own is not None else self._names
        if asked in known or (known and asked in (None, name)):
            return known[0] if asked is None or asked == name else asked
        known = await self.names()
        if asked in (None, name):
            if not known:
                raise ApiError(502, "The backend lists no models. Set server.model.", code="backend_failed")
            return known[0]
        if asked not in known:
            raise model_not_found(asked, (name, *known))
        return asked

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The backend's response to a request.

        Args:
            path: appended to the URL; a path with a leading slash is below the root instead of the version.
            body: the request.

        Raises:
            ApiError: the backend refused the request, failed, or does not answer.
        """
        client = self._root if path.startswith("/") else self._client
        try:
            return (await client.post_json(path.removeprefix("/"), body)).body
        except HttpError as error:
            raise _as_api_error(error.status, error.body, str(error)) from error

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The lines of the backend's stream, each with its line break.

        Raises:
            ApiError: as `post`. A failure after the first line becomes an event with the error.
        """
        async with self._client.stream(path, body) as lines:
            yield lines


class _Client(HttpClient):
    """Requests without retries, and streams."""

    async def get_once(self, path: str, *, is_json: bool = True) -> Any:
        """The response of a GET request."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        try:
            response = await self._client.get(url, timeout=min(_CONNECT_S, self.limits.timeout_s))
        except httpx.TransportError as error:
            reason = self.redact(f"{type(error).__name__}: {error}".rstrip(": "))
            raise _as_api_error(None, "", f"GET {url} failed: {reason}") from error
        if not response.is_success:
            text = self.redact(response.text)
            raise _as_api_error(response.status_code, "", f"GET {url} failed: status {response.status_code}: {text[:300]}")
        if not is_json:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ApiError(502, f"GET {url} returned a response that is not JSON.", code="backend_failed") from error

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Send a request and yield the lines of its stream, as `Backend.stream` does."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        try:
            async with self._turn, self._client.stream("POST", url, json=dict(body)) as response:
                if not response.is_success:
                    text = self.redact((await response.aread()).decode(errors="replace"))
                    raise _as_api_error(
                        response.status_code, text, f"POST {url} failed: status {response.status_code}: {text[:300]}"
                    )
                yield self._lines(url, response)
        except httpx.TransportError as error:
            reason = self.redact(f"{type(error).__name__}: {error}".rstrip(": "))
            raise _as_api_error(None, "", f"POST {url} failed: {reason}") from error

    async def _lines(self, url: str, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        # `aiter_lines` also splits at characters that may be part of an event, such as U+2028.
        rest = b""
        try:
            async for chunk in response.aiter_bytes():
                complete, end, after = chunk.rpartition(b"\n")
                if end:
                    yield rest + complete + end
                    rest = after
                else:
                    rest += after
            if rest:
                yield rest + b"\n"
        except httpx.TransportError as error:
            reason = self.redact(f"{type(error).__name__}: {error}".rstrip(": "))
            failure = _as_api_error(None, "", f"POST {url} failed: {reason}")
            yield server_sent_event(failure.body()).encode()


def _as_api_error(status: int | None, body: str, message: str) -> ApiError:
    """The proxy's error for a response of the backend, or for none."""
    retry = {"Retry-After": str(_RETRY_AFTER_S)}
    if status is None:
        return ApiError(503, f"The backend does not answer: {message}", code="backend_unavailable", headers=retry)
    if status in (401, 403):
        return ApiError(
            502, f"The backend refused the proxy's API key (server.api_key): status {status}.", code="backend_failed"
        )
    if status >= 500 or status < 400:
        return ApiError(502, f"The backend failed: {message}", code="backend_failed")
    error = _error_in(body)
    text = str(error.get("message") or message)
    code = error.get("code") if isinstance(error.get("code"), str) else None
    if "context length" in text.lower():
        code = "context_length_exceeded"
    param = error.get("param") if isinstance(error.get("param"), str) else None
    return ApiError(status, text, param=param, code=code, headers=retry if status == 429 else None)


def _error_in(body: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    inner = found.get("error", found) if isinstance(found, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}
