"""What a model and a division over ranks make impossible, said before anything starts; knows configs, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_core.errors import ConfigError


def check_compatibility(hf: Any, config: MegatronPolicyConfig, *, world_size: int, on_gpu: bool) -> None:
    """Refuse what cannot work, all reasons at once.

    Args:
        hf: the Hugging Face config.
        config: the section `policy`.
        world_size: ranks of the policy.
        on_gpu: whether they have GPUs (and so NCCL).

    Raises:
        ConfigError: names every key that does not fit, and what would.
    """
    found = find_incompatibilities(hf, config, world_size=world_size, on_gpu=on_gpu)
    if found:
        raise ConfigError("\n".join(f"`policy.megatron_cfg.{key}`: {reason}" for key, reason in found))


def find_incompatibilities(hf: Any, config: MegatronPolicyConfig, *, world_size: int, on_gpu: bool) -> list[tuple[str, str]]:
    """Of `megatron_cfg`: each key that does not fit, and why; see `check_compatibility`."""
    lines = [
        *_ranks(config.megatron_cfg, world_size),
        *_tensor(hf, config.megatron_cfg),
        *_pipeline(hf, config.megatron_cfg),
        *_experts(hf, config.megatron_cfg, world_size, on_gpu),
        *_engine(config.megatron_cfg, on_gpu),
    ]
    return [(key, reason) for key, _, reason in (line.partition("`: ") for line in lines)]


def _ranks(megatron: MegatronConfig, world_size: int) -> Iterator[str]:
    needed = megatron.ranks_per_replica
    if world_size % needed:
        yield (
            f"tensor_model_parallel_size`: tensor x pipeline x context = {megatron.tensor_model_parallel_size} x "
            f"{megatron.pipeline_model_parallel_size} x {megatron.context_parallel_size} = {needed} ranks hold one copy of "
            f"the model, and there are {world_size}: give the cluster a multiple of {needed} workers "
            "(`cluster.num_nodes` x `cluster.workers_per_node`)."
        )


def _tensor(hf: Any, megatron: MegatronConfig) -> Iterator[str]:
    tensor = megatron.tensor_model_parallel_size
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    if heads % tensor:
        yield f"tensor_model_parallel_size`: {heads} attention heads do not divide into {tensor}; take a divisor of {heads}."
    if groups % tensor and tensor % groups:
        yield (
            f"tensor_model_parallel_size`: {groups} key-value heads neither divide into {tensor} nor the other way round; "
            f"take a divisor or a multiple of {groups}."
        )
    ffn = hf.intermediate_size
    if ffn % tensor:
        yield f"tensor_model_parallel_size`: the MLP is {ffn} wide, which does not divide into {tensor}."


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
            f"{' with the first and last stage as given' if first or last else ''}; a chunk has at least one layer."
        )
    elif (
        (even_layers if even_stages == 0 else even_layers % (even_stages * chunks))
        or (first or 0) % chunks
        or (last or 0) % chunks
    ):
        yield (
            f"pipeline_model_parallel_size`: {layers} layers do not divide evenly into {stages} stages of {chunks} chunks. "
            "Take a divisor, or give the first or last stage another number (`num_layers_in_first_pipeline_stage`, "
            "`num_layers_in_last_pipeline_stage`)."
        )


def _experts(hf: Any, megatron: MegatronConfig, world_size: int, on_gpu: bool) -> Iterator[str]:
    divided, tensor = megatron.expert_model_parallel_size, megatron.expert_tensor_ranks
    experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None)
    if experts is None:
        if divided > 1:
            yield f"expert_model_parallel_size`: a {hf.model_type} has no experts to divide; leave it at 1."
        return
    if experts % divided:
        yield f"expert_model_parallel_size`: {experts} experts do not divide into {divided}; take a divisor."
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield (
            "sequence_parallel`: a mixture of experts under tensor parallelism needs it, since Megatron-Core would send "
            "every token to the experts once a rank otherwise; set it to true."
        )
    a_stage = world_size // megatron.pipeline_model_parallel_size
    if a_stage % (divided * tensor):
        yield (
            f"expert_model_parallel_size`: {divided} x {tensor} (experts x their tensor ranks) do not divide the {a_stage} "
            "ranks of a pipeline stage."
        )
    if divided > 1 and tensor > 1 and not on_gpu:
        yield (
            "expert_tensor_parallel_size`: divided experts that are tensor parallel as well need gathers of unequal parts, "
            "which gloo lacks; leave it at 1 on CPUs."
        )


def _engine(megatron: MegatronConfig, on_gpu: bool) -> Iterator[str]:
    if on_gpu:
        return
    if megatron.transformer_impl == "transformer_engine":
        yield "transformer_impl`: Transformer Engine runs on GPUs, and these ranks have CPUs; set it to `auto` or `local`."
    if megatron.moe_grouped_gemm:
        yield "moe_grouped_gemm`: it needs Transformer Engine, which runs on GPUs, and these ranks have CPUs; leave it out."
