"""Registers the core's own components through the hooks that every plugin uses; strings only."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_algorithms() -> list[Component]:
    """GRPO and SFT."""
    return [
        Component(
            "grpo",
            target="rl_core.algorithms.grpo:train",
            config="rl_core.algorithms.grpo_config:GRPOConfig",
            summary="Group-relative policy optimisation: rewards, compared within the samples of one prompt",
        ),
        Component(
            "sft",
            target="rl_core.algorithms.sft:train",
            config="rl_core.algorithms.sft_config:SFTConfig",
            summary="Supervised fine-tuning on given answers",
        ),
    ]


@hookimpl
def rlcore_losses() -> list[Component]:
    """Clipped policy gradient, its GRPO defaults, and negative log-likelihood."""
    return [
        Component(
            "clipped_pg",
            target="rl_core.algorithms.losses.policy_gradient:ClippedPGLossFn",
            config="rl_core.algorithms.losses.config:ClippedPGLossConfig",
            summary="Policy gradient with a clipped probability ratio",
        ),
        Component(
            "grpo",
            target="rl_core.algorithms.losses.policy_gradient:GRPOLossFn",
            config="rl_core.algorithms.losses.config:ClippedPGLossConfig",
            summary="Clipped policy gradient with the defaults of GRPO",
        ),
        Component(
            "nll",
            target="rl_core.algorithms.losses.nll:NLLLossFn",
            config="rl_core.algorithms.losses.config:NLLLossConfig",
            summary="Negative log-likelihood of the answer's tokens",
        ),
    ]


@hookimpl
def rlcore_loggers() -> list[Component]:
    """The run folder's metrics file and the terminal."""
    return [
        Component("jsonl", target="rl_core.metrics.jsonl:JsonlLogger", summary="One JSON object a step, in the run folder"),
        Component(
            "console",
            target="rl_core.metrics.console:ConsoleLogger",
            summary="Live progress on a terminal, plain lines when piped",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Rows of JSON lines."""
    return [
        Component(
            "jsonl",
            target="rl_core.data.datasets:JsonlDataset",
            config="rl_core.data.dataset_config:JsonlDatasetConfig",
            summary="One JSON object a line: prompts, conversations or answers",
        )
    ]


@hookimpl
def rlcore_weight_transports() -> list[Component]:
    """Within a process, within a node, between processes of a group."""
    return [
        Component(
            "by_reference",
            target="rl_core.weights.by_reference:ByReferenceTransport",
            summary="Policy and generation share a process and its tensors",
        ),
        Component(
            "shared_memory",
            target="rl_core.weights.shared_memory:SharedMemoryTransport",
            summary="Processes of one node read the same memory",
        ),
        Component(
            "collective",
            target="rl_core.weights.collective:CollectiveTransport",
            summary="Broadcast over a process group, gloo or NCCL",
        ),
    ]
