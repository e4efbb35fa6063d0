"""`rlcore serve`: serves a model or a run over HTTP, or forwards to another server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_train.run_folders.run_names import completed_runs, text_of_run


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL_OR_RUN] [KEY=VALUE]...",
            help="Model name or folder; run folder, or its name in runs; or step folder. Without one, requests are forwarded "
            "to `server`. Then overrides: of the settings below, of a run's config, or for a model of policy.generation and "
            "policy.tokenizer.",
            show_default=False,
            autocompletion=completed_runs,
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
    from rl_core.errors import ConfigError
    from rl_serve.edge import Address
    from rl_serve.sampling import Limits
    from rl_serve.serving import serve_model, serve_proxy
    from rl_serve.weights_api import read_update_options, vllm_command

    target, overrides = _target_in(arguments or [])
    address = Address.of(host, 7000 if port is None else port)
    limits = Limits(max_concurrent_requests=max_concurrent)
    if target is None:
        if not config and not overrides:
            raise ConfigError(
                "Nothing to serve: name a model or a run, or the server to forward to, such as ++server.host=localhost "
                "++server.port=5000."
            )
        model_options = {
            "--backend": backend is not None,
            "--best": best,
            "--allow-weight-updates": allow_weight_updates is not None,
            "--print-vllm-command": print_vllm_command,
        }
        for option in (option for option, is_given in model_options.items() if is_given):
            raise ConfigError(f"{option} is an option of models and runs, but none is named. Remove it, or name one.")
        serve_proxy(config or [], overrides, address, has_port=port is not None, name=name, limits=limits)
        return
    updates = read_update_options(target, allow_weight_updates, is_for_vllm=print_vllm_command)
    if print_vllm_command:
        refused = {"--backend": backend, "--best": best, "--config": config, "KEY=VALUE": overrides}
        print(vllm_command(target, updates=updates, name=name, host=host, port=address.port, refused=refused))
        return
    serve_model(target, config or [], overrides, address, backend=backend, name=name, best=best, updates=updates, limits=limits)


def _target_in(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The model or run, if the first argument is one, and the overrides."""
    first = arguments[0] if arguments else ""
    if first and ("=" not in first or Path(first).exists()):
        return text_of_run(first), arguments[1:]
    return None, arguments
