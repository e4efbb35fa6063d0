"""Registers the command `rlcore serve` by import path, without importing FastAPI."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_commands() -> list[Component]:
    """`rlcore serve`."""
    return [
        Component(
            "serve", target="rl_serve.command:serve", summary="Serve a model or a run over an OpenAI-compatible HTTP API."
        )
    ]
