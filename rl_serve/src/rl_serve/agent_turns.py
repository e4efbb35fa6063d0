"""Turns of agents: sampled in the thread of the training engine, and awaited or streamed in that of the endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from rl_core.errors import RLCoreError
from rl_serve.engine import SampledRow
from rl_serve.errors import ApiError
from rl_train.agents.model_server import AgentLimitError, AgentRequest, AgentSessionEndedError, AgentTurn, TurnSource

_log = logging.getLogger(__name__)


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
