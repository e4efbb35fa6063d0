"""Runs the server of `rlcore serve`: for a model or a run, or as a proxy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl_core.errors import ConfigError
from rl_serve.app import create_app, create_proxy_app
from rl_serve.backend import Backend
from rl_serve.chat_service import open_chat_service
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.listening import Address, exit_on_sigterm, listening, run_server
from rl_serve.prompt_filler import PromptFiller
from rl_serve.sampling import Limits
from rl_serve.served_model import is_run, started_model
from rl_serve.settings import ServeSettings, load_chat_settings, load_settings, split_overrides
from rl_serve.update_options import UpdateOptions, admin_key_of_environment
from rl_serve.weights_api import WeightUpdates

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
        overrides: of the settings, of a run's config, or for a model of keys of `policy.generation`.
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
        started_model(target, backend=backend, overrides=others, name=name, best=best) as model,
    ):
        service.use_tasks(model.tasks)
        if model.prompts and settings.prompt_config is None:
            print(f"trained with {model.described_prompts}: clients must send the same, or set prompt_config", file=sys.stderr)
        engine = EngineThread(model.generation)
        try:
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


def refuse_without_model(options: Mapping[str, bool], files: list[Path], overrides: list[str]) -> None:
    """Refuse a command that names neither a model nor a server, or that has options of models without one.

    Args:
        options: whether each option of models is given.
        files: files with settings.
        overrides: overrides of settings.

    Raises:
        ConfigError: names what is missing or which option to remove.
    """
    if not files and not overrides:
        raise ConfigError(
            "Nothing to serve: name a model or a run, or the server to forward to, such as ++server.host=localhost "
            "++server.port=5000."
        )
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(f"{option} is an option of models and runs, but none is named. Remove it, or name one.")


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
                limits=limits,
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
