"""Registers Transformers as policy and generation backend; uses strings only, so it does not import torch."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl

WEIGHT_TRANSPORTS = ("by_reference", "shared_memory", "collective", "disk")


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
                "dynamic_batching",
                "sequence_packing",
                "in_process",
                "generate",
                "reference",
                "scalar_head",
                "topk_logprobs",
                "shared_prefix",
                *WEIGHT_TRANSPORTS,
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
                "in_process",
                "seeds",
                "top_p",
                "top_k",
                "async_rows",
                "refit_in_flight",
                "token_streaming",
                "session_cache",
                "held_weight_digests",
                *WEIGHT_TRANSPORTS,
            ),
        )
    ]
