"""`rlcore serve`: serves a model or a run over HTTP, or forwards to another server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rl_serve.listening import Address
    from rl_serve.settings import ServeSettings

PROXY_NAME = "nemo-skills"
"""Default name of a proxy's model."""


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL_OR_RUN] [KEY=VALUE]...",
            help="Model name or folder, run folder or step folder; without one, requests are forwarded to `server`. Then "
            "overrides: of the settings below, of a run's config, or for a model keys of policy.generation.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", metavar="FILE", help="YAML file with settings. May be repeated.", show_default=False),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Generation plugin for a model; required if several are installed.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Any address but loopback requires API keys.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on, 7000 by default; 0 chooses a free one.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; by default its folder's.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Serve the best checkpoint of a run folder, not the newest.")] = False,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests that run at the same time; more get status 429.")] = 256,
    allow_weight_updates: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Accept weights from files in this folder, with an admin key.", show_default=False),
    ] = None,
    print_vllm_command: Annotated[
        bool,
        typer.Option(
            "--print-vllm-command", help="Print the command that starts vLLM's own server with weight updates, and exit."
        ),
    ] = False,
) -> None:
    """Serve a model or a run over an OpenAI-compatible HTTP API, or forward requests to a server that does.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /generate, /inference/v1/generate, /health. API keys are read
    from the environment variable RLCORE_SERVE_API_KEYS, separated by commas. SIGTERM and Ctrl-C finish running requests first.
    docs/serving.md describes the API, its limits and the settings of a proxy. ++dry_run=True prints and checks those settings.

    Example:
        rlcore serve runs/config
        rlcore serve path/to/model --backend hf policy.generation.temperature=0.7
        rlcore serve ++server.host=localhost ++server.port=5000 ++prompt_config=generic/math ++generate_port=7000
        curl http://127.0.0.1:7000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "2 + 2 ="}'
    """
    from rl_serve.allocator import return_large_blocks
    from rl_serve.listening import Address

    return_large_blocks()
    target, overrides = _target_in(arguments or [])
    address = Address.of(host, 7000 if port is None else port)
    if target is None:
        model_options = {
            "--backend": backend is not None,
            "--best": best,
            "--allow-weight-updates": allow_weight_updates is not None,
            "--print-vllm-command": print_vllm_command,
        }
        _refuse_without_model(model_options, config or [], overrides)
        _serve_proxy(config or [], overrides, address, has_port=port is not None, name=name, max_concurrent=max_concurrent)
        return
    from rl_serve.update_options import read_update_options

    updates = read_update_options(target, allow_weight_updates, is_for_vllm=print_vllm_command)
    if print_vllm_command:
        from rl_serve.vllm_command import vllm_command

        refused = {"--backend": backend, "--best": best, "--config": config, "KEY=VALUE": overrides}
        print(vllm_command(target, updates=updates, name=name, host=host, port=address.port, refused=refused))
        return
    from rl_serve.app import create_app
    from rl_serve.chat_service import open_chat_service
    from rl_serve.engine import EngineThread
    from rl_serve.listening import exit_on_sigterm, listening, run_server
    from rl_serve.sampling import Limits
    from rl_serve.served_model import is_run, started_model
    from rl_serve.settings import load_chat_settings, split_overrides
    from rl_serve.weights_api import WeightUpdates

    own, others = split_overrides(overrides)
    settings = load_chat_settings(config or [], own)
    # Before the model is loaded, so that a port in use is reported at once.
    with (
        exit_on_sigterm(),
        listening(address) as listener,
        open_chat_service(settings, of_run=is_run(Path(target))) as service,
        started_model(target, backend=backend, overrides=others, name=name, best=best) as model,
    ):
        service.use_tasks(model.tasks)
        engine = EngineThread(model.generation)
        try:
            limits = Limits(max_concurrent_requests=max_concurrent)
            app = create_app(
                model,
                engine,
                limits=limits,
                api_keys=address.api_keys,
                service=service,
                is_local=not address.api_keys,
                updates=updates
                if updates is None
                else WeightUpdates(model.generation, engine, updates.folder, updates.admin_key),
            )
            run_server(app, listener, address, name=model.name)
        finally:
            engine.close()


def _target_in(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The model or run, if the first argument is one, and the overrides."""
    first = arguments[0] if arguments else ""
    if first and ("=" not in first or Path(first).exists()):
        return first, arguments[1:]
    return None, arguments


def _refuse_without_model(options: Mapping[str, bool], files: list[Path], overrides: list[str]) -> None:
    from rl_core.errors import ConfigError

    if not files and not overrides:
        raise ConfigError(
            "Nothing to serve: name a model or a run, or the server to forward to, such as ++server.host=localhost "
            "++server.port=5000."
        )
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(f"{option} is an option of models and runs, but none is named. Remove it, or name one.")


def _serve_proxy(
    files: list[Path], overrides: list[str], address: Address, *, has_port: bool, name: str | None, max_concurrent: int
) -> None:
    from dataclasses import replace

    from rl_core.errors import ConfigError
    from rl_serve.app import create_proxy_app
    from rl_serve.backend import Backend
    from rl_serve.chat_service import open_chat_service
    from rl_serve.listening import exit_on_sigterm, listening, run_server
    from rl_serve.sampling import Limits
    from rl_serve.settings import load_settings
    from rl_serve.update_options import admin_key_of_environment

    settings, shown = load_settings(files, overrides)
    if has_port and "generate_port" in settings.model_fields_set and settings.generate_port != address.port:
        raise ConfigError(f"--port {address.port} and generate_port {settings.generate_port} differ: set one of them.")
    if not has_port:
        address = replace(address, port=settings.generate_port)
    label = name or PROXY_NAME
    with exit_on_sigterm(), open_chat_service(settings) as service:
        admin_key = admin_key_of_environment() if settings.server.server_type == "vllm" else None
        backend = Backend(settings.server, concurrency=max_concurrent, admin_key=admin_key)
        if settings.dry_run:
            _print_dry_run(settings, shown, backend, address, label)
            return
        with listening(address) as listener:
            limits = Limits(max_concurrent_requests=max_concurrent)
            app = create_proxy_app(
                backend,
                name=label,
                limits=limits,
                api_keys=address.api_keys,
                service=service,
                is_local=not address.api_keys,
                admin_key=admin_key,
            )
            run_server(app, listener, address, name=f"{label} from {settings.server.url}")


def _print_dry_run(settings: ServeSettings, shown: str, backend: object, address: Address, name: str) -> None:
    import asyncio

    from rl_serve.backend import Backend
    from rl_serve.errors import ApiError

    assert isinstance(backend, Backend)

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
        from rl_serve.prompt_filler import PromptFiller

        filling = PromptFiller.load(settings.prompt_config, settings.examples_type)
        print(f"  prompt_config {settings.prompt_config}: needs {', '.join(filling.needs)}; an example:")
        for message in filling.example():
            print(f"    [{message['role']}]")
            print("\n".join(f"    {line}" for line in message["content"].splitlines()))
    if settings.code_execution:
        print(f"  sandbox {settings.sandbox.backend}: works; at most {settings.max_code_rounds} rounds of code per answer")
    print("dry_run: nothing was started.")
