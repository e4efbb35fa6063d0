"""Registers Megatron-Core as policy backend; uses strings only, so it does not import torch."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_policies() -> list[Component]:
    """The policy `megatron`."""
    return [
        Component(
            "megatron",
            target="rl_backends_megatron.policy:MegatronPolicy",
            config="rl_backends_megatron.config:MegatronPolicyConfig",
            summary="Megatron-Core: tensor, sequence, pipeline, context, expert and data parallelism",
            capabilities=(
                "dynamic_batching",
                "sequence_packing",
                "in_process",
                "generate",
                "reference",
                "scalar_head",
                "topk_logprobs",
                "by_reference",
                "shared_memory",
                "collective",
            ),
        )
    ]
