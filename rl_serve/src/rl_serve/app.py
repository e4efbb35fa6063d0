"""The HTTP application: routes of OpenAI's API over a local engine or a backend server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from rl_serve.backend import Backend
from rl_serve.bodies import BodyRoute
from rl_serve.chat_service import ChatService
from rl_serve.engine import EngineThread
from rl_serve.errors import add_error_handlers
from rl_serve.limits_middleware import LimitsMiddleware, check_local_name, key_check
from rl_serve.local_routes import LocalRoutes
from rl_serve.model_routes import add_model_routes
from rl_serve.proxy_routes import ProxyRoutes, add_forwarded_updates
from rl_serve.sampling import Limits
from rl_serve.served_model import ServedModel
from rl_serve.weights_api import WeightUpdates, add_weight_updates

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid."},
    401: {"description": "The API key is missing or wrong."},
    403: {"description": "The request names a host other than this machine, and there are no API keys."},
    404: {"description": "There is no such model."},
    408: {"description": "The client took too long to send the body."},
    413: {"description": "The body is too large."},
    431: {"description": "Headers and path are too large."},
    429: {"description": "Too many requests run at the same time."},
    502: {"description": "The backend failed (proxy only)."},
    503: {"description": "The engine failed, or the backend does not answer."},
}


def create_app(
    model: ServedModel,
    engine: EngineThread,
    *,
    limits: Limits,
    api_keys: Sequence[str] = (),
    service: ChatService | None = None,
    is_local: bool = False,
    updates: WeightUpdates | None = None,
) -> FastAPI:
    """The application of a local model.

    Args:
        model: the served model.
        engine: its engine.
        limits: the server's limits.
        api_keys: accepted keys; without any, requests need no key.
        service: what chat and `/generate` do with prompts and answers; by default nothing.
        is_local: refuse requests that name another host than this machine.
        updates: replaces the weights, if that is allowed.
    """
    routes = LocalRoutes(model, engine, limits, service or ChatService(), updates)
    app = _app(routes, limits=limits, api_keys=api_keys, is_local=is_local, at_end=routes.close)
    if updates is not None:
        add_weight_updates(app, updates)
    return app


def create_proxy_app(
    backend: Backend,
    *,
    name: str,
    limits: Limits,
    api_keys: Sequence[str] = (),
    service: ChatService | None = None,
    is_local: bool = False,
    admin_key: str | None = None,
) -> FastAPI:
    """The application of a proxy.

    Args:
        backend: the server that requests are forwarded to; closed with the application.
        name: name of the proxy's model.
        limits: the server's limits.
        api_keys: accepted keys; without any, requests need no key.
        service: what chat and `/generate` do with prompts and answers; by default nothing.
        is_local: refuse requests that name another host than this machine.
        admin_key: forward weight updates that have this key.
    """
    routes = ProxyRoutes(backend, name, limits, service or ChatService())
    app = _app(routes, limits=limits, api_keys=api_keys, is_local=is_local, at_end=backend.close)
    if admin_key is not None:
        add_forwarded_updates(app, backend, admin_key=admin_key)
    return app


def _app(
    routes: LocalRoutes | ProxyRoutes,
    *,
    limits: Limits,
    api_keys: Sequence[str],
    is_local: bool,
    at_end: Callable[[], Awaitable[None]],
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await at_end()

    app = FastAPI(title="rlcore serve", docs_url=None, redoc_url=None, lifespan=lifespan)
    checks = [*([check_local_name] if is_local else ()), *([key_check(api_keys)] if api_keys else ())]
    app.add_middleware(LimitsMiddleware, limits=limits, checks=checks)
    add_error_handlers(app)
    app.get("/health", responses={503: _ERRORS[503]})(routes.health)
    add_model_routes(app, routes.models, responses={code: _ERRORS[code] for code in (401, 502, 503)})
    handlers = {
        "/v1/completions": routes.completions,
        "/v1/chat/completions": routes.chat,
        "/generate": routes.generate,
        "/inference/v1/generate": routes.generate_tokens,
    }
    for path, handler in handlers.items():
        app.router.add_api_route(path, handler, methods=["POST"], responses=_ERRORS, route_class_override=BodyRoute)
    return app
