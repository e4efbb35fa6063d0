"""Registers the commands `rlcore serve` and `rlcore chat` and the endpoint for agents by import path, without FastAPI."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_commands() -> list[Component]:
    """`rlcore serve` and `rlcore chat`."""
    return [
        Component(
            "serve", target="rl_serve.command:serve", summary="Serve a model or a run over an OpenAI-compatible HTTP API."
        ),
        Component("chat", target="rl_serve.terminal:chat", summary="Chat with a model or a run in the terminal."),
    ]


@hookimpl
def rlcore_model_servers() -> list[Component]:
    """The endpoint for agents."""
    return [
        Component(
            "agent_endpoint",
            target="rl_serve.agent_endpoint:AgentEndpoint",
            summary="Chat completions on the loopback interface, answered from the training engine",
        )
    ]
