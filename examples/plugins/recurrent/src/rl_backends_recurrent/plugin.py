"""Registers the policy and the engine `recurrent` by their import paths."""

from rl_core.plugins import Component, hookimpl

TRANSPORTS = ("by_reference", "shared_memory", "disk", "collective")


@hookimpl
def rlcore_policies():
    return [
        Component(
            "recurrent",
            target="rl_backends_recurrent.facades:RecurrentPolicy",
            config="rl_backends_recurrent.config:RecurrentPolicyConfig",
            summary="Trains a recurrent language model (GRU)",
            capabilities=(
                "in_process",
                "multiple_ranks",
                "dynamic_batching",
                "topk_logprobs",
                "scores_sampled_sets",
                *TRANSPORTS,
            ),
        )
    ]


@hookimpl
def rlcore_generations():
    return [
        Component(
            "recurrent",
            target="rl_backends_recurrent.facades:RecurrentGeneration",
            config="rl_backends_recurrent.config:RecurrentGenerationConfig",
            summary="Samples from a recurrent language model (GRU), whose state has a fixed size",
            capabilities=(
                *("in_process", "held_weight_digests", "async_rows", "refit_in_flight", "top_p", "top_k"),
                *("sampled_sets", "top_logprobs"),
                *TRANSPORTS,
            ),
        )
    ]
