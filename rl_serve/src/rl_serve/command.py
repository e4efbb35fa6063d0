"""`rlcore serve`: serves a model or a run over HTTP."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rl_serve.sampling import Limits
    from rl_serve.served_model import ServedModel

API_KEYS = "RLCORE_SERVE_API_KEYS"
"""Environment variable with the accepted keys, separated by commas."""
_DRAIN_S = 30
"""Seconds that running requests may take after SIGTERM."""
_MAX_HEADER_BYTES = 16 * 1024


def serve(
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="Model name or folder, run folder or step folder.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides of the run's config; for a model, keys of policy.generation.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Generation plugin for a model; required if several are installed.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback requires API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 7000,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; by default its folder's.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Serve the best checkpoint of a run folder, not the newest.")] = False,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests that run at the same time; more get status 429.")] = 256,
) -> None:
    """Serve a model or a run over an OpenAI-compatible HTTP API.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /inference/v1/generate, /health. API keys are read from the
    environment variable RLCORE_SERVE_API_KEYS, separated by commas. SIGTERM and Ctrl-C finish running requests first.
    docs/serving.md describes the API and its limits.

    Example:
        rlcore serve runs/config
        rlcore serve path/to/model --backend hf policy.generation.temperature=0.7
        curl http://127.0.0.1:7000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "2 + 2 ="}'
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    keys = _keys(host)
    from rl_serve.sampling import Limits
    from rl_serve.served_model import started_model

    # Before the model is loaded, so that a port in use is reported at once.
    with (
        closing(_listener(host, port)) as listener,
        started_model(target, backend=backend, overrides=overrides or [], name=name, best=best) as model,
    ):
        _run(model, listener, host, Limits(max_concurrent_requests=max_concurrent), keys)


def _keys(host: str) -> list[str]:
    from rl_core.errors import ConfigError

    keys = [key.strip() for key in os.environ.get(API_KEYS, "").split(",") if key.strip()]
    if not keys and not _is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines, so API keys are required. Set {API_KEYS}, or listen on 127.0.0.1."
        )
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listener(host: str, port: int) -> socket.socket:
    from rl_core.errors import ConfigError

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror}. Choose another port.") from error
    return listener


def _run(model: ServedModel, listener: socket.socket, host: str, limits: Limits, keys: list[str]) -> None:
    import uvicorn

    from rl_serve.app import create_app
    from rl_serve.engine import EngineThread

    engine = EngineThread(model.generation)
    try:
        config = uvicorn.Config(
            create_app(model, engine, limits=limits, api_keys=keys),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            ws="none",
        )
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {model.name} on http://{shown}:{listener.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.close()
