"""Registers Transformers as policy and generation backend; uses strings only, so it does not import torch."""

from __future__ import annotations

from rl_core.plugins import Capability, Component, hookimpl


@hookimpl
def rlcore_policies() -> list[Component]:
    """The policy `hf`."""
    return [
        Component(
            "hf",
            target="rl_backends_hf.policy:HuggingFacePolicy",
            config="rl_backends_hf.config:HFPolicyConfig",
            summary="Any Transformers causal LM: one process, replicas or FSDP2",
            capabilities=(
                Capability.DYNAMIC_BATCHING,
                Capability.SEQUENCE_PACKING,
                Capability.IN_PROCESS,
                Capability.MULTIPLE_RANKS,
                Capability.SCALAR_HEAD,
                Capability.TOPK_LOGPROBS,
                Capability.IMAGES,
                Capability.SCORES_SAMPLED_SETS,
                Capability.BY_REFERENCE,
                Capability.SHARED_MEMORY,
                Capability.COLLECTIVE,
                Capability.DISK,
            ),
        )
    ]


@hookimpl
def rlcore_generations() -> list[Component]:
    """The generation backend `hf`."""
    return [
        Component(
            "hf",
            target="rl_backends_hf.generation:HuggingFaceGeneration",
            config="rl_backends_hf.config:HFGenerationConfig",
            summary="Batched decoding with Transformers, one prefill per prompt; rows join while others run",
            capabilities=(
                Capability.IN_PROCESS,
                Capability.TOP_P,
                Capability.TOP_K,
                Capability.SAMPLED_SETS,
                Capability.TOP_LOGPROBS,
                Capability.IMAGES,
                Capability.ASYNC_ROWS,
                Capability.REFIT_IN_FLIGHT,
                Capability.LORA_ADAPTERS,
                Capability.HELD_WEIGHT_DIGESTS,
                Capability.BY_REFERENCE,
                Capability.SHARED_MEMORY,
                Capability.COLLECTIVE,
                Capability.DISK,
            ),
        )
    ]
