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
from rl_serve.weights_api import ADMIN_HEADER

_RETRY_AFTER_S = 1
_CONNECT_S = 10.0
_FACTS = ("max_model_len", "streams_tokens")
MAX_RESPONSE_BYTES = 64 * 2**20
"""Size of a response of the backend, and of an event of a stream."""


class Backend:
    """An OpenAI-compatible server.

    Args:
        section: its address.
        concurrency: maximum number of requests at the same time.
        admin_key: its key for weight updates, if they are forwarded.
    """

    def __init__(self, section: BackendSection, *, concurrency: int, admin_key: str | None = None) -> None:
        self.section = section
        limits = RequestLimits(
            concurrency=concurrency,
            timeout_s=section.timeout_s,
            deadline_s=section.timeout_s * (section.max_retries + 1),
            max_retries=section.max_retries,
            max_response_bytes=MAX_RESPONSE_BYTES,
        )
        self._client = _Client(base_url=section.url, api_key=section.api_key, limits=limits)
        root = section.url.removesuffix("/v1")
        self._root = _Client(base_url=root, api_key=section.api_key, limits=limits)
        admin = {ADMIN_HEADER: admin_key} if admin_key is not None else {}
        self._admin = _Client(base_url=root, api_key=section.api_key, headers=admin, limits=limits)
        self._names: list[str] = []
        self._facts: dict[str, dict[str, Any]] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._root.close()
        await self._admin.close()

    async def names(self) -> list[str]:
        """The names of the backend's models.

        Raises:
            ApiError: the backend does not answer.
        """
        found = await self._client.get_once("models")
        data = found.get("data") if isinstance(found, Mapping) else None
        if not isinstance(data, list):
            raise ApiError(502, "The backend's list of models has no `data`.", code="backend_failed")
        entries = [entry for entry in data if isinstance(entry, Mapping) and "id" in entry]
        self._names = [str(entry["id"]) for entry in entries]
        self._facts = {str(entry["id"]): {name: entry[name] for name in _FACTS if name in entry} for entry in entries}
        return self._names

    def facts(self, name: str | None) -> Mapping[str, Any]:
        """`max_model_len` and `streams_tokens` of a model, by default the first, if `names` has found them."""
        return self._facts.get(name or next(iter(self._names), ""), {})

    async def check(self) -> None:
        """Check that the backend answers.

        Raises:
            ApiError: it does not.
        """
        if self.section.server_type == "vllm":
            await self._root.get_once("health", is_json=False)
        else:
            await self._client.get_once("models")

    async def model_for(self, requested: str | None, name: str) -> str:
        """The backend's name of a requested model.

        Args:
            requested: the requested name.
            name: the proxy's own name, which stands for the backend's model.

        Raises:
            ApiError: there is no such model, or the backend does not answer.
        """
        own = self.section.model
        if requested in (None, name) and own is not None:
            return own
        known = [own] if own is not None else self._names
        if requested in known or (known and requested in (None, name)):
            return known[0] if requested is None or requested == name else requested
        known = await self.names()
        if requested in (None, name):
            if not known:
                raise ApiError(502, "The backend lists no models. Set server.model.", code="backend_failed")
            return known[0]
        if requested not in known:
            raise model_not_found(requested, (name, *known))
        return requested

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The backend's response to a request.

        Args:
            path: appended to the URL; a path with a leading slash is below the root instead of the version.
            body: the request.

        Raises:
            ApiError: the backend refused the request, failed, or does not answer.
        """
        try:
            return (await self._client_of(path).post_json(path.removeprefix("/"), body)).body
        except HttpError as error:
            raise _as_api_error(error.status, error.body, str(error)) from error

    async def completions(self, path: str, body: Mapping[str, Any], *, has: str) -> dict[str, Any]:
        """The backend's response to a sampling request, of which each choice has the field `has`.

        Raises:
            ApiError: as `post`, or the response has another form.
        """
        response = await self.post(path, body)
        choices = response.get("choices") if isinstance(response, dict) else None
        form = _FORMS[has]
        if not isinstance(choices, list) or not choices or not all(_has(choice, has, form) for choice in choices):
            raise ApiError(502, f"The backend's response has no choices with `{has}`.", code="backend_failed")
        return dict(response)

    async def post_admin(self, path: str, body: Any) -> Any:
        """The backend's response to a request of a weight update, which is sent once.

        Raises:
            ApiError: as `post`.
        """
        return await self._admin.once("POST", path, body, timeout_s=self.section.timeout_s)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The lines of the backend's stream, each with its line break.

        Raises:
            ApiError: as `post`. A failure after the first line becomes an event with the error.
        """
        async with self._client_of(path).stream(path.removeprefix("/"), body) as lines:
            yield lines

    def _client_of(self, path: str) -> _Client:
        return self._root if path.startswith("/") else self._client


class _Client(HttpClient):
    """Requests without retries, and streams."""

    async def get_once(self, path: str, *, is_json: bool = True) -> Any:
        """The response of a GET request."""
        return await self.once("GET", path, None, timeout_s=min(_CONNECT_S, self.limits.timeout_s), is_json=is_json)

    async def once(self, method: str, path: str, body: Any, *, timeout_s: float, is_json: bool = True) -> Any:
        """The response of one attempt."""
        outcome = await self._attempt(method, path, body, timeout_s=timeout_s)
        if isinstance(outcome, tuple):
            return outcome[1]
        if is_json or not 200 <= (outcome.status or 500) < 300:
            text = outcome.body if method == "POST" else ""
            raise _as_api_error(outcome.status, text, f"{method} {self.base_url.rstrip('/')}/{path} failed: {outcome.reason}")
        return None

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Send a request and yield the lines of its stream, as `Backend.stream` does."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        request = self._client.build_request("POST", url, json=dict(body))
        async with self._turn:
            try:
                response: httpx.Response = await self._client.send(request, stream=True)
                kind = response.headers.get("content-type", "")
                is_stream = response.is_success and (not kind or kind.startswith("text/event-stream"))
                content = b"" if is_stream else await self.read(response)
            except Exception as error:  # as in `HttpClient`
                raise self._broken(url, error) from error
            if not is_stream:
                text = self.redact((content or b"").decode(errors="replace"))
                what = f"status {response.status_code}" if not response.is_success else f"{kind} instead of a stream"
                raise _as_api_error(response.status_code, text, f"POST {url} failed: {what}: {text[:300]}")
            try:
                yield self._lines(url, response)
            finally:
                await response.aclose()

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
                if len(rest) > self.limits.max_response_bytes:
                    raise ValueError(f"an event has more than {self.limits.max_response_bytes} bytes")
            if rest:
                yield rest + b"\n"
        except Exception as error:  # as in `HttpClient`
            yield server_sent_event(self._broken(url, error).body()).encode()

    def _broken(self, url: str, error: Exception) -> ApiError:
        reason = self.redact(f"{type(error).__name__}: {error}".rstrip(": "))
        return _as_api_error(None, "", f"POST {url} failed: {reason}")


_FORMS: Mapping[str, type] = {"message": dict, "text": str, "token_ids": list}
"""Types of the field that each choice of an endpoint has."""


def _has(choice: Any, name: str, form: type) -> bool:
    value = choice.get(name) if isinstance(choice, dict) else None
    if form is dict and isinstance(value, dict):
        return isinstance(value.get("content"), str | None)
    return isinstance(value, form)


def _as_api_error(status: int | None, body: str, message: str) -> ApiError:
    """The proxy's error for a response of the backend, or for none."""
    retry = {"Retry-After": str(_RETRY_AFTER_S)}
    if status is None:
        return ApiError(503, f"The backend does not answer: {message}", code="backend_unavailable", headers=retry)
    if status in (401, 403):
        return ApiError(
            502, f"The backend refused the proxy's API key (server.api_key): status {status}.", code="backend_failed"
        )
    if status == 503:  # such as a pause
        code = _error_in(body).get("code")
        code = code if isinstance(code, str) else "backend_unavailable"
        return ApiError(503, f"The backend does not answer: {message}", code=code, headers=retry)
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
        parsed = json.loads(body)
        json.dumps(parsed, ensure_ascii=False).encode()  # lone surrogates could not be sent on
    except (ValueError, RecursionError):
        return {}
    inner = parsed.get("error", parsed) if isinstance(parsed, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}
