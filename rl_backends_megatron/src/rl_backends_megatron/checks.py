"""Checks model and parallelism for compatibility before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_backends_megatron.megatron_section import MegatronConfig
from rl_core.errors import ConfigError


def check_compatibility(hf: Any, config: MegatronConfig, *, world_size: int, on_gpu: bool) -> None:
    """Raise one error with all incompatibilities.

    Args:
        hf: the Hugging Face config.
        config: `policy.megatron_cfg`.
        world_size: number of ranks of the policy.
        on_gpu: whether they have GPUs (and thus NCCL).

    Raises:
        ConfigError: lists every incompatible key with possible values.
    """
    problems = find_incompatibilities(hf, config, world_size=world_size, on_gpu=on_gpu)
    if problems:
        raise ConfigError(
            "\n".join(f"`policy.megatron_cfg.{key}`: {reason}" for key, reason in problems),
            key=f"policy.megatron_cfg.{problems[0][0]}",
        )


def find_incompatibilities(hf: Any, config: MegatronConfig, *, world_size: int, on_gpu: bool) -> list[tuple[str, str]]:
    """Each incompatible key of `megatron_cfg` with the reason; see `check_compatibility`."""
    lines = [
        *_ranks(config, world_size),
        *_tensor(hf, config),
        *_pipeline(hf, config),
        *_experts(hf, config, world_size, on_gpu),
        *_engine(config, on_gpu),
    ]
    return [(key, reason) for key, _, reason in (line.partition("`: ") for line in lines)]


def _ranks(megatron: MegatronConfig, world_size: int) -> Iterator[str]:
    needed = megatron.ranks_per_replica
    if world_size % needed:
        yield (
            f"tensor_model_parallel_size`: tensor x pipeline x context = {megatron.tensor_model_parallel_size} x "
            f"{megatron.pipeline_model_parallel_size} x {megatron.context_parallel_size} = {needed} ranks hold one copy of "
            f"the model, but there are {world_size}: use a multiple of {needed} workers "
            "(`cluster.num_nodes` x `cluster.workers_per_node`)."
        )


def _tensor(hf: Any, megatron: MegatronConfig) -> Iterator[str]:
    tensor = megatron.tensor_model_parallel_size
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    if heads % tensor:
        yield f"tensor_model_parallel_size`: {tensor} does not divide {heads} attention heads; use a divisor of {heads}."
    if groups % tensor and tensor % groups:
        yield (
            f"tensor_model_parallel_size`: {tensor} is neither a divisor nor a multiple of {groups} key-value heads; use "
            "one that is."
        )
    ffn = hf.intermediate_size
    if ffn % tensor:
        yield f"tensor_model_parallel_size`: {tensor} does not divide the MLP's width {ffn}."


def _pipeline(hf: Any, megatron: MegatronConfig) -> Iterator[str]:
    stages = megatron.pipeline_model_parallel_size
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    layers = hf.num_hidden_layers
    even_stages = stages - (first is not None) - (last is not None)
    even_layers = layers - (first or 0) - (last or 0)
    if even_layers < even_stages * chunks:
        yield (
            f"pipeline_model_parallel_size`: {layers} layers are too few for {stages} stages of {chunks} chunks"
            f"{' with the given first and last stage' if first or last else ''}; each chunk needs at least one layer."
        )
    elif (
        (even_layers if even_stages == 0 else even_layers % (even_stages * chunks))
        or (first or 0) % chunks
        or (last or 0) % chunks
    ):
        yield (
            f"pipeline_model_parallel_size`: {layers} layers do not divide evenly into {stages} stages of {chunks} chunks. "
            "Use a divisor, or set another number of layers for the first or last stage "
            "(`num_layers_in_first_pipeline_stage`, `num_layers_in_last_pipeline_stage`)."
        )


def _experts(hf: Any, megatron: MegatronConfig, world_size: int, on_gpu: bool) -> Iterator[str]:
    expert_parallel, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_ranks
    experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)
    if experts is None:
        if expert_parallel > 1:
            yield f"expert_model_parallel_size`: {hf.model_type} models have no experts; leave it at 1."
        return
    if experts % expert_parallel:
        yield f"expert_model_parallel_size`: {expert_parallel} does not divide {experts} experts; use a divisor."
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield (
            "sequence_parallel`: required for a mixture of experts with tensor parallelism, because Megatron-Core would "
            "otherwise send every token to the experts once per rank; set it to true."
        )
    ranks_per_stage = world_size // megatron.pipeline_model_parallel_size
    if ranks_per_stage % (expert_parallel * tensor):
        yield (
            f"expert_model_parallel_size`: {expert_parallel} x {tensor} (expert parallel x expert tensor parallel) "
            f"does not divide the {ranks_per_stage} ranks of a pipeline stage."
        )
    if expert_parallel > 1 and tensor > 1 and not on_gpu:
        yield (
            "expert_tensor_parallel_size`: together with expert parallelism, it needs gathers of unequal sizes, which gloo "
            "does not support; leave it at 1 on CPUs."
        )


def _engine(megatron: MegatronConfig, on_gpu: bool) -> Iterator[str]:
    if on_gpu:
        return
    if megatron.transformer_impl == "transformer_engine":
        yield "transformer_impl`: Transformer Engine requires GPUs, but these ranks run on CPUs; set it to `auto` or `local`."
    if megatron.moe_grouped_gemm:
        yield "moe_grouped_gemm`: requires Transformer Engine, which needs GPUs, but these ranks run on CPUs; leave it out."
