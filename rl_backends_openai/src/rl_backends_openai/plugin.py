"""Registers OpenAI-compatible servers as generation backend; strings only, so it imports no torch."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_generations() -> list[Component]:
    """The generation backend `openai`."""
    return [
        Component(
            "openai",
            target="rl_backends_openai.generation:OpenAIGeneration",
            config="rl_backends_openai.config:OpenAIConfig",
            summary="A model behind an OpenAI-compatible server: rlcore serve, vLLM or a remote service",
            capabilities=("in_process", "seeds", "top_p", "top_k", "async_rows", "disk"),
        )
    ]
