"""Registers the policy and the engine `litgpt` by their import paths."""

from rl_core.plugins import Component, hookimpl

TRANSPORTS = ("by_reference", "shared_memory", "disk", "collective")


@hookimpl
def rlcore_policies():
    return [
        Component(
            "litgpt",
            target="rl_backends_litgpt.facades:LitGPTPolicy",
            config="rl_backends_litgpt.config:LitGPTPolicyConfig",
            summary="Trains a LitGPT model",
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
            "litgpt",
            target="rl_backends_litgpt.facades:LitGPTGeneration",
            config="rl_backends_litgpt.config:LitGPTGenerationConfig",
            summary="Samples from a LitGPT model with its cache",
            capabilities=(
                *("in_process", "held_weight_digests", "async_rows", "refit_in_flight", "top_p", "top_k"),
                *("sampled_sets", "top_logprobs"),
                *TRANSPORTS,
            ),
        )
    ]
