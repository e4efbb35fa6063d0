"""The local endpoint that answers agents from the training engine: chat completions with a key per rollout."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rl_core.errors import RLCoreError
from rl_core.interfaces.messages import Message
from rl_serve.chat_format import ChatFormat, read_messages, read_offered_tools
from rl_serve.disconnects import unless_disconnected
from rl_serve.engine import SampledRow, SamplingRow
from rl_serve.errors import ApiError, add_error_handlers, server_sent_event
from rl_serve.gate import Gate
from rl_serve.listening import KEEP_ALIVE_S
from rl_serve.requests import ChatRequest
from rl_serve.responses import ChoiceFormat, ResponseHead, usage
from rl_serve.sampling import Limits, SamplingPlan
from rl_train.agents.model_server import (
    AgentLimitError,
    AgentRequest,
    AgentSessionEndedError,
    AgentTurn,
    ModelServer,
    ServerSettings,
    TurnSource,
)

_log = logging.getLogger(__name__)
_LIMITS = Limits(max_concurrent_requests=100_000, max_body_bytes=32 * 2**20)
"""Agents are trusted functions of the run; the number of rollouts limits their requests."""
_START_TIMEOUT_S = 30.0


class AgentEndpoint(ModelServer):
    """A server on a free port of the loopback interface, in a thread of the driver process.

    Args:
        settings: describes the engine.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._routes = AgentRoutes(settings)
        app = FastAPI(title="rlcore agent endpoint", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(Gate, limits=_LIMITS)
        add_error_handlers(app)
        app.get("/v1/models")(self._routes.models)
        app.post("/v1/chat/completions")(self._routes.chat)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=KEEP_ALIVE_S,
                ws="none",
            )
        )
        # Connections wait in the queue of the socket until the server accepts them.
        listener.listen(2048)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="agent-endpoint", daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def open(self, turns: TurnSource) -> str:
        key = secrets.token_urlsafe(24)
        self._routes.turns[key] = turns
        return key

    def close(self, key: str) -> None:
        self._routes.turns.pop(key, None)

    def shutdown(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_TIMEOUT_S)


class AgentRoutes:
    """The handlers.

    Args:
        settings: describes the engine.

    Attributes:
        turns: samples the turns of each rollout, by key.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._chat = ChatFormat(settings.tokenizer)
        self.turns: dict[str, TurnSource] = {}

    async def models(self, request: Request) -> dict[str, Any]:
        """The policy."""
        self._turns_of(request)
        entry = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "rlcore"}
        return {"object": "list", "data": [entry]}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The next turn of a rollout."""
        turns = self._turns_of(request)
        self._refuse_unsupported(body)
        messages = read_messages([message.model_dump() for message in body.messages])
        tools = read_offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        asked = AgentRequest(
            prompt=self._chat.prompt(messages, tools),
            messages=_messages(messages),
            stop_strings=body.stop_strings(),
            max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        )
        turn = await unless_disconnected(request, _sampled(turns, asked))
        plan = _plan_of(asked, turn)
        choices = ChoiceFormat(
            tokenizer=self._settings.tokenizer, plan=plan, logprobs=body.logprobs, token_ids=body.return_token_ids
        )
        row = SampledRow(
            token_ids=turn.token_ids, logprobs=turn.logprobs, truncated=turn.truncated, weight_version=turn.weight_version
        )
        text, complete = choices.text(0, row), not turn.truncated
        message = self._chat.answer(turn.token_ids, text, prompt=turn.prompt, messages=messages, tools=tools, complete=complete)
        counts = usage(plan, {0: row})
        if not body.stream:
            head = ResponseHead.new("chatcmpl", "chat.completion", self._settings.model)
            return JSONResponse(head.body([choices.message(0, row, message)], usage=counts))
        head = ResponseHead.new("chatcmpl", "chat.completion.chunk", self._settings.model)
        chunks = [head.body([choices.message(0, row, message, key="delta")])]
        if body.stream_options is not None and body.stream_options.include_usage:
            chunks.append(head.body([], usage=counts))
        return _stream(chunks)

    def _turns_of(self, request: Request) -> TurnSource:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        turns = self.turns.get(key.strip()) if scheme.lower() == "bearer" else None
        if turns is None:
            raise _ended("There is no rollout with this key, or it has ended.")
        return turns

    def _refuse_unsupported(self, body: ChatRequest) -> None:
        body.refuse_unsupported()
        if body.n != 1:
            raise ApiError(400, "n must be 1: a rollout has one next turn.", param="n", code="unsupported_value")
        temperature = self._settings.temperature
        fixed = {
            "n": (body.n == 1, "1: a rollout has one next turn"),
            "temperature": (
                body.temperature in (None, temperature),
                f"{temperature:g} or absent: the policy is trained on samples at policy.generation.temperature",
            ),
            "top_p": (body.top_p in (None, 1), "1 or absent: the policy is trained on unfiltered samples"),
            "seed": (body.seed is None, "absent: turns have the seeds of the run"),
        }
        for name, (fits, value) in fixed.items():
            if not fits:
                raise ApiError(400, f"{name} must be {value}.", param=name, code="unsupported_value")


async def _sampled(turns: TurnSource, asked: AgentRequest) -> AgentTurn:
    try:
        return await turns.sample(asked)
    except AgentLimitError as error:
        raise ApiError(400, str(error), code="context_length_exceeded") from error
    except AgentSessionEndedError as error:
        raise _ended(str(error)) from error
    except RLCoreError as error:
        _log.exception("the engine failed")
        raise ApiError(503, f"The engine failed: {type(error).__name__}.") from error


def _ended(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _messages(messages: list[dict[str, Any]]) -> list[Message]:
    return [Message(**message) for message in messages]  # type: ignore[typeddict-item]


def _plan_of(asked: AgentRequest, turn: AgentTurn) -> SamplingPlan:
    """The sampled turn in the form of a request to the server."""
    row = SamplingRow(prompt=turn.prompt, seed=0, max_new_tokens=len(turn.token_ids), stop_strings=tuple(asked.stop_strings))
    return SamplingPlan(rows=[row], greedy=False, prompts=[turn.prompt], n=1)


def _stream(chunks: Sequence[Mapping[str, Any]]) -> StreamingResponse:
    """A finished turn as server-sent events."""

    async def events() -> AsyncIterator[str]:
        for chunk in chunks:
            yield server_sent_event(chunk)
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
