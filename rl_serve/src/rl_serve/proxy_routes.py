"""The endpoints of a proxy, which forwards requests and weight updates to an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rl_serve.backend import Backend
from rl_serve.chat_format import read_messages
from rl_serve.chat_responses import ChatResponses, refuse_with_code
from rl_serve.chat_service import ChatService, CompleteChat, Completion
from rl_serve.errors import ApiError
from rl_serve.event_streams import EventStream, cancel_on_disconnect
from rl_serve.health import SharedCheck
from rl_serve.requests import ForwardedChatRequest, ForwardedCompletionRequest, ForwardedTokensRequest, GenerateRequest
from rl_serve.sampling import Limits
from rl_serve.weights_api import PATHS, admin_check

_NOT_FORWARDED = ("expected_answer", "n", "stream", "stream_options")


class ProxyRoutes:
    """The handlers.

    Args:
        backend: the server that requests are forwarded to.
        name: the proxy's name for the backend's model.
        limits: the server's limits.
        service: what chat and `/generate` do with prompts and answers.
    """

    def __init__(self, backend: Backend, name: str, limits: Limits, service: ChatService) -> None:
        self._backend, self._name, self._service = backend, name, service
        self._responses = ChatResponses(service, limits, name)
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
            return await self._responses.chat(messages, self._completer(given), body, request)
        forwarded = {**plain, "messages": _as_sent(messages)}
        forwarded.pop("expected_answer", None)
        if not record:
            return await self._forward("chat/completions", forwarded, request, has="message")
        return as_json(await cancel_on_disconnect(request, self._graded(forwarded, messages, record)))

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer a record, whose fields fill the prompt config."""
        record = body.record()
        messages = self._service.prompts.record(record)
        given = {"model": await self._backend.model_for(body.model, self._name), **body.sampling()}
        if (most := body.new_tokens()) is not None:
            given["max_tokens"] = most
        return await self._responses.generate(messages, self._completer(given)(0), record, request)

    async def _graded(
        self, forwarded: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
    ) -> dict[str, Any]:
        model = await self._backend.model_for(forwarded.get("model"), self._name)
        found = await self._backend.completions("chat/completions", {**forwarded, "model": model}, has="message")
        if forwarded.get("continue_final_message"):
            messages = [*messages[:-1], {**messages[-1], "prefix": True}]
        for choice in found["choices"]:
            choice |= await self._service.grade(messages, str(choice["message"].get("content") or ""), record)
        return found

    async def _forward(self, path: str, body: Mapping[str, Any], request: Request, *, has: str) -> Response:
        sent = {**body, "model": await self._backend.model_for(body.get("model"), self._name)}
        if not sent.get("stream"):
            return as_json(await cancel_on_disconnect(request, self._backend.completions(path, sent, has=has)))
        exits = AsyncExitStack()
        # The backend may not respond before its first token.
        lines = await cancel_on_disconnect(request, exits.enter_async_context(self._backend.stream(path, sent)))
        return EventStream(lines, exits)

    def _completer(self, given: Mapping[str, Any]) -> Callable[[int], CompleteChat]:
        """Makes the function that continues a conversation, for each choice; with a seed, choices differ."""

        def of_choice(choice: int) -> CompleteChat:
            async def complete(messages: Sequence[Mapping[str, Any]], number: int) -> Completion:
                seed = given.get("seed")
                seeded = {} if seed is None or choice == 0 else {"seed": (seed + choice) % 2**31}
                body = {**given, **seeded, "messages": _as_sent(messages)}
                found = await self._backend.completions("chat/completions", body, has="message")
                choice_found = found["choices"][0]
                usage = found.get("usage")
                return Completion(
                    content=str(choice_found["message"].get("content") or ""),
                    finish_reason="length" if choice_found.get("finish_reason") == "length" else "stop",
                    prompt_tokens=_count(usage, "prompt_tokens"),
                    completion_tokens=_count(usage, "completion_tokens"),
                )

            return complete

        return of_choice


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


def _as_sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON objects."""
    return [dict(message) for message in messages]


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
