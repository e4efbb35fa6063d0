"""Cancels work whose client has closed the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from rl_serve.errors import ApiError

ResultT = TypeVar("ResultT")


async def cancel_on_disconnect(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """The result of `work`, which is cancelled if the client closes its connection.

    Raises:
        ApiError: the client closed the connection; this response is not read.
    """
    working = asyncio.ensure_future(work)
    hanging_up = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client closed the connection.")
        return working.result()
    finally:
        for task in (working, hanging_up):
            task.cancel()
        await asyncio.gather(working, hanging_up, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
