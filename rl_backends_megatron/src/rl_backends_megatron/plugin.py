"""Registers Megatron-Core as policy backend; uses strings only, so it does not import torch."""

from __future__ import annotations

from rl_core.plugins import Capability, Component, hookimpl


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
                Capability.DYNAMIC_BATCHING,
                Capability.SEQUENCE_PACKING,
                Capability.IN_PROCESS,
                Capability.MULTIPLE_RANKS,
                Capability.SCALAR_HEAD,
                Capability.TOPK_LOGPROBS,
                Capability.BY_REFERENCE,
                Capability.SHARED_MEMORY,
                Capability.COLLECTIVE,
            ),
        )
    ]
