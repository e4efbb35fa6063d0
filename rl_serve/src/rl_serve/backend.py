"""A proxy: the endpoints that forward requests and weight updates, and the OpenAI-compatible server that they go to."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rl_core.http import HttpClient, HttpError, RequestLimits
from rl_core.interfaces.records import plain_text
from rl_serve.chat_format import read_messages
from rl_serve.chat_service import ChatService, CompleteChat, Completion, refuse_with_code
from rl_serve.errors import ApiError, model_not_found
from rl_serve.pausing import SharedCheck
from rl_serve.requests import ForwardedChatRequest, ForwardedCompletionRequest, ForwardedTokensRequest, GenerateRequest
from rl_serve.responses import EventStream, cancel_on_disconnect, server_sent_event
from rl_serve.sampling import Limits
from rl_serve.settings import BackendSection
from rl_serve.weights_api import ADMIN_HEADER, PATHS, admin_check

_RETRY_AFTER_S = 1
_CONNECT_S = 10.0
_FACTS = ("max_model_len", "streams_tokens", "reads_token_images")
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
        """The facts (`_FACTS`) of a model, by default the first, if `names` has found them."""
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

    async def completions(self, path: str, body: Mapping[str, Any], *, has: str) -> dict[str, Any]:
        """The backend's response to a sampling request, of which each choice has the field `has`.

        Args:
            path: appended to the URL; a path with a leading slash is below the root instead of the version.
            body: the request.
            has: one of `_FORMS`.

        Raises:
            ApiError: the backend refused the request, failed, or does not answer, or the response has another form.
        """
        try:
            response = (await self._client_of(path).post_json(path.removeprefix("/"), body)).body
        except HttpError as error:
            raise _as_api_error(error.status, error.body, str(error)) from error
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or not choices or not all(_has(choice, has) for choice in choices):
            raise ApiError(502, f"The backend's response has no choices with `{has}`.", code="backend_failed")
        return dict(response)

    async def post_admin(self, path: str, body: Any) -> Any:
        """The backend's response to a request of a weight update, which is sent once; raises as `completions`."""
        return await self._admin.once("POST", path, body, timeout_s=self.section.timeout_s)

    def stream(self, path: str, body: Mapping[str, Any]) -> AbstractAsyncContextManager[AsyncGenerator[bytes, None]]:
        """The lines of the backend's stream, each with its line break.

        Raises:
            ApiError: as `completions`. A failure after the first line becomes an event with the error.
        """
        return self._client_of(path).stream(path.removeprefix("/"), body)

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


def _has(choice: Any, name: str) -> bool:
    value: Any = choice.get(name) if isinstance(choice, dict) else None
    if name == "message" and isinstance(value, dict):
        return isinstance(value.get("content"), str | None)
    return isinstance(value, _FORMS[name])


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


_NOT_FORWARDED = ("expected_answer", "n", "stream", "stream_options")


class ProxyRoutes:
    """The handlers; the arguments are those of `create_proxy_app`."""

    def __init__(self, backend: Backend, name: str, limits: Limits, service: ChatService) -> None:
        self._backend, self._name, self._limits, self._service = backend, name, limits, service
        self._check = SharedCheck(backend.check)

    async def health(self) -> Response:
        """Whether the server runs and the backend answers; status 503 if it does not."""
        try:
            await self._check.result()
        except ApiError as error:
            found = {"status": "backend unavailable", "model": self._name, "reason": error.message}
            return JSONResponse(found, status_code=503)
        return JSONResponse({"status": "ok", "model": self._name})

    async def models(self) -> dict[str, Mapping[str, Any]]:
        """The proxy's name, and the models of the backend."""
        names = dict.fromkeys([self._name, *await self._backend.names()])
        return {name: self._backend.facts(self._backend.section.model if name == self._name else name) for name in names}

    async def completions(self, body: ForwardedCompletionRequest, request: Request) -> Response:
        """Forward the request unchanged."""
        return await self._forward("completions", body.fields(), request, has="text")

    async def generate_tokens(self, body: ForwardedTokensRequest, request: Request) -> Response:
        """Forward the request unchanged."""
        if self._backend.section.server_type != "vllm":
            raise ApiError(404, "This proxy has no token endpoints: they require server_type vllm.", code="not_found")
        return await self._forward("/inference/v1/generate", body.fields(), request, has="token_ids")

    async def chat(self, body: ForwardedChatRequest, request: Request) -> Response:
        """Forward the conversation with the filled prompt; answers may run code and be graded."""
        record = body.record()
        plain = body.fields()
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        if self._service.prompts.is_used or self._service.code is not None or record:
            messages = self._service.prompts.conversation(read_messages(messages))
        given = {name: value for name, value in plain.items() if name not in _NOT_FORWARDED}
        if self._service.code is not None:
            refuse_with_code(plain)
            given["model"] = await self._backend.model_for(body.model, self._name)
            completer = self._completer(given)
            return await self._service.respond(messages, completer, body, request, model=self._name, limits=self._limits)
        forwarded = {**plain, "messages": messages}
        forwarded.pop("expected_answer", None)
        if not record:
            return await self._forward("chat/completions", forwarded, request, has="message")
        return as_json(await cancel_on_disconnect(request, self._graded(forwarded, messages, record)))

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer a record, whose fields fill the prompt config."""
        record = body.record()
        messages = self._service.prompts.record(record)
        given = {"model": await self._backend.model_for(body.model, self._name), **body.sampling()}
        if (most := body.token_limit()[0]) is not None:
            given["max_tokens"] = most
        return await self._service.respond_to_record(messages, self._completer(given), record, request)

    async def _graded(
        self, forwarded: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
    ) -> dict[str, Any]:
        model = await self._backend.model_for(forwarded.get("model"), self._name)
        found = await self._backend.completions("chat/completions", {**forwarded, "model": model}, has="message")
        log = [{**message, "content": plain_text(message["content"])} for message in messages]
        if forwarded.get("continue_final_message"):
            log[-1]["prefix"] = True
        for choice in found["choices"]:
            choice |= await self._service.grade(log, str(choice["message"].get("content") or ""), record)
        return found

    async def _forward(self, path: str, body: Mapping[str, Any], request: Request, *, has: str) -> Response:
        sent = {**body, "model": await self._backend.model_for(body.get("model"), self._name)}
        if not sent.get("stream"):
            return as_json(await cancel_on_disconnect(request, self._backend.completions(path, sent, has=has)))
        exits = AsyncExitStack()
        # The backend may not respond before its first token.
        lines = await cancel_on_disconnect(request, exits.enter_async_context(self._backend.stream(path, sent)))
        return EventStream(lines, exits)

    def _completer(self, given: Mapping[str, Any]) -> CompleteChat:
        """The function that continues a conversation; with a seed, choices differ."""

        async def complete(choice: int, messages: Sequence[Mapping[str, Any]], number: int) -> Completion:
            seed = given.get("seed")
            seeded = {} if seed is None or choice == 0 else {"seed": (seed + choice) % 2**31}
            body = {**given, **seeded, "messages": list(messages)}
            found = await self._backend.completions("chat/completions", body, has="message")
            first, usage = found["choices"][0], found.get("usage")
            return Completion(
                content=str(first["message"].get("content") or ""),
                finish_reason="length" if first.get("finish_reason") == "length" else "stop",
                prompt_tokens=_count(usage, "prompt_tokens"),
                completion_tokens=_count(usage, "completion_tokens"),
            )

        return complete


def as_json(value: Any) -> JSONResponse:
    """A value of the backend as a response.

    Raises:
        ApiError: it has numbers or a nesting that JSON responses cannot have.
    """
    try:
        return JSONResponse(value)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ApiError(502, f"The backend's response cannot be sent as JSON: {reason}.", code="backend_failed") from error


def _count(usage: Any, name: str) -> int:
    """A count of tokens; 0 if the backend reports none."""
    found = usage.get(name) if isinstance(usage, Mapping) else None
    return found if isinstance(found, int) else 0


def add_forwarded_updates(app: FastAPI, backend: Backend, *, admin_key: str) -> None:
    """Add the endpoints of weight updates, which check the admin key, to an application that has not been started.

    Args:
        app: the proxy's application.
        backend: the server whose weights are replaced; it has the same admin key.
        admin_key: the key that requests need.
    """
    for path in PATHS:
        app.post(path, dependencies=[Depends(admin_check(admin_key))])(_forwarder(backend, path.removeprefix("/")))


def _forwarder(backend: Backend, path: str) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def forward(request: Request) -> JSONResponse:
        """Forward the request unchanged."""
        try:
            body = await request.json() if await request.body() else {}
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "Invalid JSON.", code="invalid_body") from error
        return JSONResponse(await backend.post_admin(path, body))

    return forward
