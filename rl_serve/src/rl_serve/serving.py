"""Runs the server of `rlcore serve`: the HTTP application of OpenAI's API over a local engine, or over another server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from rl_core.errors import ConfigError
from rl_serve.backend import Backend, ProxyRoutes, add_forwarded_updates
from rl_serve.chat_service import ChatService, open_chat_service
from rl_serve.conversation import PromptFiller
from rl_serve.edge import (
    Address,
    BodyRoute,
    LimitsMiddleware,
    check_local_name,
    exit_on_sigterm,
    key_check,
    listening,
    run_server,
)
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError, add_error_handlers, model_not_found
from rl_serve.local_routes import LocalRoutes
from rl_serve.sampling import Limits
from rl_serve.served_model import ServedModel, is_run, started_model
from rl_serve.settings import ServeSettings, load_chat_settings, load_settings, split_overrides
from rl_serve.weights_api import UpdateOptions, WeightUpdates, add_weight_updates, admin_key_of_environment

PROXY_NAME = "nemo-skills"
"""Default name of a proxy's model."""


def serve_model(
    target: str,
    files: list[Path],
    overrides: list[str],
    address: Address,
    *,
    backend: str | None,
    name: str | None,
    best: bool,
    updates: UpdateOptions | None,
    limits: Limits,
) -> None:
    """Serve a model or a run until SIGTERM or Ctrl-C.

    Args:
        target: model name or folder, run folder or step folder.
        files: files with settings.
        overrides: of the settings, of a run's config, or for a model of keys of `policy.generation` and `policy.tokenizer`.
        address: where to listen.
        backend: generation plugin for a model.
        name: name of the model in the API; by default its folder's.
        best: serve the best checkpoint of a run folder.
        updates: the weight updates that are accepted; None for none.
        limits: the server's limits.
    """
    of_settings, others = split_overrides(overrides)
    settings = load_chat_settings(files, of_settings)
    # Before the model is loaded, so that a port in use is reported at once.
    with (
        exit_on_sigterm(),
        listening(address) as listener,
        open_chat_service(settings, of_run=is_run(Path(target))) as service,
        started_model(target, backend=backend, overrides=others, name=name, best=best, images=settings.images) as model,
    ):
        service.use_tasks(model.tasks)
        if model.prompts and settings.prompt_config is None:
            print(f"trained with {model.described_prompts}: clients must send the same, or set prompt_config", file=sys.stderr)
        engine = EngineThread(model.generation)
        try:
            app = create_app(
                model,
                engine,
                limits=limits.with_body(settings.max_request_mib, has_images=model.reads_images),
                api_keys=address.api_keys,
                service=service,
                is_local=not address.api_keys,
                updates=None if updates is None else WeightUpdates(model.generation, engine, updates.folder, updates.admin_key),
            )
            run_server(app, listener, address, name=model.name)
        finally:
            engine.close()


def serve_proxy(
    files: list[Path], overrides: list[str], address: Address, *, has_port: bool, name: str | None, limits: Limits
) -> None:
    """Forward requests until SIGTERM or Ctrl-C; with `dry_run`, print and check the settings instead.

    Args:
        files: files with settings.
        overrides: overrides of settings.
        address: where to listen, unless `generate_port` is set.
        has_port: whether the port was given as an option.
        name: name of the model in the API.
        limits: the server's limits.

    Raises:
        ConfigError: the settings are invalid.
    """
    settings, shown = load_settings(files, overrides)
    if has_port and "generate_port" in settings.model_fields_set and settings.generate_port != address.port:
        raise ConfigError(f"--port {address.port} and generate_port {settings.generate_port} differ: set one of them.")
    if not has_port:
        address = replace(address, port=settings.generate_port)
    label = name or PROXY_NAME
    with exit_on_sigterm(), open_chat_service(settings) as service:
        admin_key = admin_key_of_environment() if settings.server.server_type == "vllm" else None
        backend = Backend(settings.server, concurrency=limits.max_concurrent_requests, admin_key=admin_key)
        if settings.dry_run:
            _print_dry_run(settings, shown, backend, address, label)
            return
        with listening(address) as listener:
            app = create_proxy_app(
                backend,
                name=label,
                limits=limits.with_body(settings.max_request_mib, has_images=True),
                api_keys=address.api_keys,
                service=service,
                is_local=not address.api_keys,
                admin_key=admin_key,
            )
            run_server(app, listener, address, name=f"{label} from {settings.server.url}")


def _print_dry_run(settings: ServeSettings, shown: str, backend: Backend, address: Address, name: str) -> None:
    async def state() -> str:
        try:
            return f"serves {', '.join(await backend.names()) or 'no model'}"
        except ApiError as error:
            return f"not available now: {error.message}"
        finally:
            await backend.close()

    print(shown, end="")
    print("\nchecks:")
    print(f"  settings: valid; listens on {address.url}/v1 as {name}")
    print(f"  server {settings.server.url}: {asyncio.run(state())}")
    if settings.prompt_config is not None:
        filler = PromptFiller.load(settings.prompt_config, settings.examples_type)
        print(f"  prompt_config {settings.prompt_config}: needs {', '.join(filler.needs)}; an example:")
        for message in filler.example():
            print(f"    [{message['role']}]")
            print("\n".join(f"    {line}" for line in message["content"].splitlines()))
    if settings.code_execution:
        print(f"  sandbox {settings.sandbox.backend}: works; at most {settings.max_code_rounds} rounds of code per answer")
    print("dry_run: nothing was started.")


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
        limits: as in `create_app`.
        api_keys: as in `create_app`.
        service: as in `create_app`.
        is_local: as in `create_app`.
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


def add_model_routes(
    app: FastAPI,
    models: Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]],
    *,
    responses: dict[int | str, dict[str, Any]],
) -> None:
    """Serve a list of models, and each of them by its id, which may contain slashes.

    Args:
        app: The application.
        models: Name to further fields of each model.
        responses: The errors of `models`, for the OpenAPI document; a missing model adds status 404.
    """

    async def entries() -> dict[str, dict[str, Any]]:
        entry = {"object": "model", "created": 0, "owned_by": "rlcore"}
        return {name: {"id": name, **entry, **fields} for name, fields in (await models()).items()}

    async def list_models() -> dict[str, Any]:
        """The served models."""
        return {"object": "list", "data": list((await entries()).values())}

    async def retrieve(model: str) -> dict[str, Any]:
        """The model with this id."""
        found = await entries()
        if model not in found:
            raise model_not_found(model, found)
        return found[model]

    app.get("/v1/models", responses=responses)(list_models)
    app.get("/v1/models/{model:path}", responses={404: {"description": "There is no such model."}, **responses})(retrieve)
