"""Registers OpenAI-compatible servers as generation backend; strings only, so it imports no torch."""

from __future__ import annotations

from rl_core.plugins import Capability, Component, hookimpl


@hookimpl
def rlcore_generations() -> list[Component]:
    """The generation backend `openai`."""
    return [
        Component(
            "openai",
            target="rl_backends_openai.generation:OpenAIGeneration",
            config="rl_backends_openai.config:OpenAIConfig",
            summary="A model behind an OpenAI-compatible server: rlcore serve, vLLM or a remote service",
            capabilities=(
                Capability.IN_PROCESS,
                Capability.TOP_P,
                Capability.TOP_K,
                Capability.ASYNC_ROWS,
                Capability.IMAGES,
                Capability.DISK,
                Capability.LORA_ADAPTERS,
            ),
        )
    ]
