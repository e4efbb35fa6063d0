"""The local endpoint that answers agents from the training engine: chat completions with a key per rollout.

Turns are sampled in the thread of the training engine, and awaited or streamed in that of the endpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Scope

from rl_core.errors import RLCoreError
from rl_core.interfaces.records import Message
from rl_serve.chat_format import ChatFormat, read_messages, read_offered_tools
from rl_serve.choices import ChatChoices
from rl_serve.edge import BodyRoute, LimitsMiddleware, bearer_key, server_config
from rl_serve.engine import SampledRow, SamplingRow, TokenizerThreads
from rl_serve.errors import ApiError, add_error_handlers
from rl_serve.requests import ChatRequest, read_response_format
from rl_serve.responses import EventStream, cancel_on_disconnect, errors_as_events
from rl_serve.sampling import Limits, SamplingPlan
from rl_serve.serving import add_model_routes
from rl_train.agents.model_server import (
    AgentLimitError,
    AgentRequest,
    AgentSessionEndedError,
    AgentTurn,
    ModelServer,
    ServerSettings,
    TurnSource,
)

_LIMITS = Limits(max_concurrent_requests=100_000, max_body_bytes=32 * 2**20, body_timeout_s=600.0, read_timeout_s=600.0)
"""Agents are trusted functions of the run, which may keep its process busy; the number of rollouts limits their requests."""
_START_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class AgentEndpoint(ModelServer):
    """A server on a free port of the loopback interface, in a thread of the driver process; `settings` describe the engine."""

    def __init__(self, settings: ServerSettings) -> None:
        self._routes = AgentRoutes(settings)
        app = FastAPI(
            title="rlcore agent endpoint", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._routes.lifespan
        )
        app.add_middleware(LimitsMiddleware, limits=_LIMITS, checks=[self._routes.turns_of])
        add_error_handlers(app)
        add_model_routes(app, self._routes.models, responses={})
        app.router.add_api_route("/v1/chat/completions", self._routes.chat, methods=["POST"], route_class_override=BodyRoute)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        self._server = uvicorn.Server(server_config(app, drain_s=1))
        # Connections wait in the queue of the socket until the server accepts them.
        listener.listen(2048)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="agent-endpoint", daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def open(self, turns: TurnSource) -> str:
        key = secrets.token_urlsafe(24)
        self._routes.turns[_digest(key.encode())] = turns
        return key

    def close(self, key: str) -> None:
        self._routes.turns.pop(_digest(key.encode()), None)

    def shutdown(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_TIMEOUT_S)


class AgentRoutes:
    """The handlers.

    Attributes:
        turns: samples the turns of each rollout, by the digest of its key, because the time of a look-up depends on it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._chat = ChatFormat(settings.tokenizer)
        self._threads = TokenizerThreads()
        self.turns: dict[bytes, TurnSource] = {}

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """The lifespan of the application; ends the threads at its end."""
        try:
            yield
        finally:
            await self._threads.close()

    async def models(self) -> dict[str, dict[str, Any]]:
        """The policy, the only model."""
        return {self._settings.model: {}}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The next turn of a rollout."""
        turns = self.turns_of(request.scope)
        self._refuse_unsupported(body)
        messages, images = await self._threads.run(
            self._chat.with_references,
            read_messages([message.model_dump() for message in body.messages], images=turns.images),
        )
        tools = read_offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        prompt, placed = await self._threads.run(self._chat.prompt, messages, images, tools)
        requested = AgentRequest(
            prompt=prompt,
            images=placed,
            messages=[Message(**message) for message in messages],  # type: ignore[typeddict-item]
            stop_strings=body.stop_strings(),
            max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        )

        def choices(turn: AgentTurn) -> ChatChoices:
            stops = tuple(requested.stop_strings)
            row = SamplingRow(prompt=turn.prompt, seed=0, max_new_tokens=len(turn.token_ids), stop_strings=stops)
            return ChatChoices(
                tokenizer=self._settings.tokenizer,
                plan=SamplingPlan(rows=[row], greedy=False),
                logprobs=body.logprobs,
                token_ids=body.return_token_ids,
                chat=self._chat,
                messages=messages,
                tools=tools,
            )

        if body.stream:
            return await self._stream(stream_turn(turns, requested), choices, request, has_usage=body.has_usage)
        turn = await cancel_on_disconnect(request, sample_turn(turns, requested))
        model, threads = self._settings.model, self._threads
        return JSONResponse(await choices(turn).response({0: row_of(turn)}, model=model, threads=threads))

    async def _stream(
        self,
        arrivals: AsyncGenerator[tuple[AgentTurn, bool], None],
        choices: Callable[[AgentTurn], ChatChoices],
        request: Request,
        *,
        has_usage: bool,
    ) -> EventStream:
        """A turn as events while it is sampled. An error before its first tokens has its own status."""

        async def rows() -> AsyncGenerator[tuple[int, SampledRow], None]:
            yield 0, row_of(begun, is_finished=is_finished)
            async for turn, is_last in arrivals:
                yield 0, row_of(turn, is_finished=is_last)

        begun, is_finished = await cancel_on_disconnect(request, anext(arrivals))
        model, threads = self._settings.model, self._threads
        events = choices(begun).events(rows(), model=model, threads=threads, has_usage=has_usage)
        return EventStream(errors_as_events(events), aclosing(arrivals))

    def turns_of(self, scope: Scope) -> TurnSource:
        """What samples the turns of a request; refuses one whose rollout does not exist, before its body is read."""
        turns = self.turns.get(_digest(bearer_key(scope)))
        if turns is None:
            raise ended_error("There is no rollout with this key, or it has ended.")
        return turns

    def _refuse_unsupported(self, body: ChatRequest) -> None:
        body.refuse_unsupported()
        body.refuse_other_model(self._settings.model)
        temperature = self._settings.temperature
        fixed = {
            "n": (body.n == 1, "1: a rollout has one next turn"),
            "temperature": (
                body.temperature in (None, temperature),
                f"{temperature:g} or absent: the policy is trained on samples at policy.generation.temperature",
            ),
            "top_p": (body.top_p in (None, 1), "1 or absent: policy.generation.top_p sets it for all rollouts"),
            "top_k": (body.top_k in (None, -1, 0), "-1 or absent: policy.generation.top_k sets it for all rollouts"),
            **dict.fromkeys(body.row_options(), (False, "absent: the policy is trained on samples without it")),
            "seed": (body.seed is None, "absent: turns have the seeds of the run"),
            "top_logprobs": (not body.top_logprobs, "0 or absent: the engine reports those of the sampled tokens to agents"),
            "continue_final_message": (not body.continue_final_message, "false: the policy writes whole messages"),
            "response_format": (
                read_response_format(body.response_format) is None,
                "text or absent: the policy is trained on unconstrained samples",
            ),
            "expected_answer": (body.expected_answer is None, "absent: the agent or its environment gives the reward"),
        }
        for name, (fits, value) in fixed.items():
            if not fits:
                raise ApiError(400, f"{name} must be {value}.", param=name, code="unsupported_value")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def sample_turn(turns: TurnSource, requested: AgentRequest) -> AgentTurn:
    """The next turn of a rollout.

    Raises:
        ApiError: the rollout has reached a limit or has ended, or the engine failed.
    """
    try:
        return await turns.sample(requested)
    except AgentLimitError as error:
        raise ApiError(400, str(error), code="context_length_exceeded") from error
    except AgentSessionEndedError as error:
        raise ended_error(str(error)) from error
    except RLCoreError as error:
        _log.exception("the engine failed")
        raise ApiError(503, f"The engine failed: {type(error).__name__}.") from error


async def stream_turn(turns: TurnSource, requested: AgentRequest) -> AsyncGenerator[tuple[AgentTurn, bool], None]:
    """Yield (the turn with its tokens so far, whether it is finished); closing the iterator cancels an unfinished turn.

    Raises:
        ApiError: as `sample_turn`.
    """
    here = asyncio.get_running_loop()
    arrivals: asyncio.Queue[AgentTurn | None] = asyncio.Queue()

    def put(turn: AgentTurn) -> None:
        with suppress(RuntimeError):  # the endpoint was shut down meanwhile
            here.call_soon_threadsafe(arrivals.put_nowait, turn)

    sampling = asyncio.ensure_future(sample_turn(turns, replace(requested, on_tokens=put)))
    sampling.add_done_callback(lambda _: arrivals.put_nowait(None))
    try:
        while (turn := await arrivals.get()) is not None:
            yield turn, False
        yield sampling.result(), True
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


def ended_error(message: str) -> ApiError:
    """The error of a key whose rollout does not exist."""
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def row_of(turn: AgentTurn, *, is_finished: bool = True) -> SampledRow:
    """A turn as a completion of the server."""
    return SampledRow(
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        truncated=turn.truncated,
        weight_version=turn.weight_version,
        is_finished=is_finished,
    )
