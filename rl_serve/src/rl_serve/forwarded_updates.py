"""Weight updates through a proxy: it checks the admin key and forwards them to `rlcore serve --allow-weight-updates`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from rl_serve.backend import Backend
from rl_serve.errors import ApiError
from rl_serve.weights_api import PATHS, admin_check


def add_forwarded_updates(app: FastAPI, backend: Backend, *, admin_key: str) -> None:
    """Add the endpoints to an application that has not been started.

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
