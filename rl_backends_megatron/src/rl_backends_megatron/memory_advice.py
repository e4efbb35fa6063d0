"""Keys that lower the memory of a policy, with values, for the errors of full memory."""

from __future__ import annotations

from rl_backends_megatron.config import MegatronPolicyConfig


def memory_advice(config: MegatronPolicyConfig, doing: str) -> str:
    """Which keys of the section lower the memory of a phase, such as "scoring".

    Args:
        config: the section of the model.
        doing: the phase, as `rl_core.interfaces.out_of_memory.explaining_memory` names it.
    """
    megatron, keys = config.megatron_cfg, []
    training = doing == "training"
    if training or doing == "scoring":
        keys += _smaller_microbatches(config, training=training)
        if training and not (config.activation_checkpointing or megatron.recompute_granularity == "full"):
            keys.append("set `activation_checkpointing: true`")
    elif doing == "a refit":
        keys.append("lower `policy.generation.refit_buffer_mib`")
    if not keys or doing in ("loading", "the optimizer step"):
        if not (config.frozen or megatron.use_distributed_optimizer):
            keys.append("shard the optimizer state (`megatron_cfg.use_distributed_optimizer: true`)")
        ranks = megatron.tensor_model_parallel_size
        keys.append(f"raise `megatron_cfg.tensor_model_parallel_size` from {ranks} to {2 * ranks}")
        if config.dtype_name == "float32":
            keys.append("set `precision: bfloat16`")
    keys.append("let the engine use less of the GPU, if both share it")
    return f"In the section of this model: {'; or '.join(keys)}."


def _smaller_microbatches(config: MegatronPolicyConfig, *, training: bool) -> list[str]:
    """The key of the size of microbatches, with half of its value, unless they cannot be smaller."""
    if config.sequence_packing.enabled or config.dynamic_batching.enabled:
        section = "sequence_packing" if config.sequence_packing.enabled else "dynamic_batching"
        key = f"{section}.{'train_mb_tokens' if training else 'logprob_mb_tokens'}"
        size = getattr(getattr(config, section), key.partition(".")[2])
        smallest = config.max_total_sequence_length
    else:
        key = "train_micro_batch_size" if training else "logprob_batch_size"
        size, smallest = getattr(config, key), 1
    return [f"lower `{key}` from {size} to {max(smallest, size // 2)}"] if size > smallest else []
